#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace tessera {

/// A tensor of a model that another tool wrote.
struct ModelTensor {
  std::shared_ptr<SafetensorsFile> file;
  TensorHeader header;             ///< whose numbers were checked
  std::vector<std::string> names;  ///< the header's, and others if it is tied

  /// Contiguous.
  at::Tensor read() const;
};

/// The tensors of a safetensors file, or of a directory with such files as Hugging Face's tools
/// write them, in the order of the files' names and of the bytes in each. Nothing but headers is
/// read.
///
/// If the directory has an index, `model.safetensors.index.json` or else the only one that is named
/// alike, that says which file has which tensor; other files are left alone. Without an index all
/// files are taken, and if their names are numbered (`model-00001-of-00003.safetensors`), all
/// numbers must be there and nothing else.
///
/// Throws `c10::ValueError` that names the file, for one that is missing or damaged, a tensor that
/// is missing or there twice, and for a directory without safetensors files or with several
/// indices.
std::vector<ModelTensor> open_model(const std::filesystem::path& path);

}  // namespace tessera
