#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/files/file.h"
#include "interop/pickle.h"

namespace tessera {

/// A file that Python's `torch.save` made: a zip file with a pickle in it.
class TorchFile {
 public:
  /// A record of the zip file, stored uncompressed.
  struct Record {
    int64_t offset = 0;  ///< of its bytes, from the beginning of the file
    int64_t nbytes = 0;
  };

  /// Opens a file of a dict of tensors. Throws `c10::ValueError`, naming the file, for another one.
  explicit TorchFile(const std::filesystem::path& path);

  /// The tensors of the dict; see `named_tensors()`.
  const std::vector<std::pair<std::string, PickledTensor>>& tensors() const { return tensors_; }
  /// Returns the values, contiguous.
  at::Tensor read(const PickledTensor& tensor) const;
  /// Reads bytes of a contiguous tensor.
  void read_bytes_of(const PickledTensor& tensor, int64_t offset, size_t nbytes, void* out) const;

  const std::string& path() const { return file_.path(); }

 private:
  std::string read_record(const std::string& name, int64_t most,
                          const std::optional<std::string>& otherwise = std::nullopt) const;
  const Record& storage_of(const PickledTensor& tensor) const;
  void count_bytes(const PickledTensor& tensor, std::set<PickledTensor>& seen,
                   std::map<std::string, int64_t>& used) const;

  File file_;
  std::map<std::string, Record> records_;  // by their names in the zip file
  std::vector<std::pair<std::string, PickledTensor>> tensors_;
};

}  // namespace tessera
