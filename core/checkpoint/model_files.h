#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace tessera {

/// A tensor of a model in a file that another tool wrote.
struct ModelTensor {
  std::shared_ptr<SafetensorsFile> file;
  TensorHeader header;             ///< its numbers were checked
  std::vector<std::string> names;  ///< the header's, and others if the tensor is tied

  /// Returns the values, contiguous.
  at::Tensor read() const;
};

/// Opens the tensors of a safetensors file, of an index, or of a directory of such files as Hugging
/// Face's tools write it, in the order of the files' names and of the bytes in each. Reads headers
/// only.
///
/// If the directory has an index, `model.safetensors.index.json` or else the only one with a name
/// of that form, the index determines which file has which tensor; other files are ignored. Without
/// an index all files are taken; if their names are numbered (`model-00001-of-00003.safetensors`),
/// all numbers must be present, and no other files.
///
/// Throws `c10::ValueError`, naming the file, if a file is missing or damaged, or if a tensor is
/// missing or present twice; also for a directory without safetensors files or with several
/// indices.
std::vector<ModelTensor> open_model(const std::filesystem::path& path);

/// Returns the files that an index of a model names, and the names of the tensors in each. Throws
/// `c10::ValueError`, naming the index, if it is none, or if a file is missing.
std::map<std::filesystem::path, std::set<std::string>> files_of_index(
    const std::filesystem::path& index);

}  // namespace tessera
