#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/file.h"
#include "checkpoint/pickle.h"

namespace caffe2::serialize {
class PyTorchStreamWriter;
}  // namespace caffe2::serialize

namespace tessera {

/// A file that Python's `torch.save` made of a state dict: a zip file with a pickle in it.
class TorchFile {
 public:
  /// A record of the zip file, which is stored uncompressed.
  struct Record {
    int64_t offset = 0;  ///< of its bytes, from the beginning of the file
    int64_t nbytes = 0;
  };

  /// Throws `c10::ValueError`, naming the file, if it is not such a file.
  explicit TorchFile(const std::filesystem::path& path);

  const std::vector<std::pair<std::string, PickledTensor>>& tensors() const { return tensors_; }
  /// Returns the values, contiguous.
  at::Tensor read(const PickledTensor& tensor) const;

 private:
  std::string read_record(const std::string& name, int64_t most,
                          const std::optional<std::string>& otherwise = std::nullopt) const;
  void check_tensors() const;

  File file_;
  std::map<std::string, Record> records_;  // by their names in the zip file
  std::vector<std::pair<std::string, PickledTensor>> tensors_;
};

/// Writes a file that Python's `torch.load(weights_only=True)` reads as a dict of tensors.
class TorchFileWriter {
 public:
  explicit TorchFileWriter(const std::filesystem::path& path);
  ~TorchFileWriter();

  /// Writes one tensor after another. `names`: several for a tensor that is tied.
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
