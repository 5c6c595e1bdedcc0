#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/file.h"
#include "checkpoint/index.h"
#include "checkpoint/pickle.h"

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

/// Writes a file that Python's `torch.load(weights_only=True)` reads as a dict of tensors, each
/// under all of its names. `read` returns the values of one tensor at a time.
void write_torch_file(const std::filesystem::path& path,
                      const std::vector<const TensorRecord*>& records,
                      const std::function<at::Tensor(const TensorRecord&)>& read);

}  // namespace tessera
