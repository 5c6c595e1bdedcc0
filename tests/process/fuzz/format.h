#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/draw.h"

namespace tessera::testing {

/// A format of files that the library reads, and inputs of it that are whole, damaged, or made to
/// do harm.
struct FuzzFormat {
  /// Writes an input into an empty directory.
  std::function<void(Draw& draw, const std::filesystem::path& directory)> write;
  /// All ways to read it, by name. Their output goes into a directory of its own. They throw
  /// `c10::Error` that names something in `directory`, and nothing else.
  std::vector<std::pair<std::string, std::function<void(const std::filesystem::path& directory,
                                                        const std::filesystem::path& made)>>>
      reads;
};

/// A checkpoint; mostly its index is changed.
FuzzFormat index_format();
/// A safetensors file.
FuzzFormat safetensors_format();
/// A directory of safetensors files, with an index or without.
FuzzFormat model_format();
/// A file of `torch.save`: a pickle in a zip file.
FuzzFormat torch_format();
/// A list of parameters for `tessera plan`.
FuzzFormat sizes_format();

/// The bytes of a safetensors file.
std::string safetensors_bytes(const std::string& header, size_t data_bytes);

std::string read_bytes(const std::filesystem::path& path);
void write_bytes(const std::filesystem::path& path, const std::string& bytes);

/// Throws an error that names no file if the imported checkpoint is not whole.
void import_and_verify(const std::filesystem::path& from, const std::filesystem::path& made);
/// Reads the sizes, and plans with them.
void plan_with(const std::filesystem::path& from);

}  // namespace tessera::testing
