#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/pickle.h"
#include "checkpoint/safetensors.h"

namespace caffe2::serialize {
class PyTorchStreamReader;
class PyTorchStreamWriter;
}  // namespace caffe2::serialize

namespace tessera {

/// A file that Python's `torch.save` made of a state dict: a zip file with a pickle in it.
class TorchFile {
 public:
  /// Throws `c10::ValueError`, naming the file, for what is no such file.
  explicit TorchFile(const std::filesystem::path& path);
  ~TorchFile();

  const std::vector<std::pair<std::string, PickledTensor>>& tensors() const { return tensors_; }
  /// Contiguous.
  at::Tensor read(const PickledTensor& tensor) const;

 private:
  std::filesystem::path path_;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
  std::vector<std::pair<std::string, PickledTensor>> tensors_;
};

/// Writes a file that Python's `torch.load(weights_only=True)` reads as a dict of tensors.
class TorchFileWriter {
 public:
  explicit TorchFileWriter(const std::filesystem::path& path);
  ~TorchFileWriter();

  /// One after the other. `names`: several for a tensor that is tied.
  void write(const std::vector<std::string>& names, const at::Tensor& value);
  void finish();

 private:
  struct Written {
    std::vector<std::string> names;
    at::ScalarType dtype;
    std::vector<int64_t> shape;
  };

  std::unique_ptr<caffe2::serialize::PyTorchStreamWriter> writer_;
  std::vector<Written> written_;
};

}  // namespace tessera
