#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/files/file.h"
#include "interop/pickle.h"

namespace tessera {

/// Bytes [offset, offset + nbytes) of a file, which has them.
struct FileRange {
  std::shared_ptr<const File> file;
  int64_t offset = 0, nbytes = 0;

  /// Throws `c10::ValueError` for a read past the end of the range.
  void read(void* data, size_t count, int64_t at) const;
};

/// A file that Python's `torch.save` made: a zip file with a pickle in it.
class TorchFile {
 public:
  /// A record of the zip file, which is stored uncompressed.
  struct Record {
    int64_t offset = 0;  ///< of its bytes, from the beginning of the file
    int64_t nbytes = 0;
  };

  /// Opens a file of a dict of tensors. Throws `c10::ValueError`, naming the file, for another one.
  explicit TorchFile(const std::filesystem::path& path);
  /// Opens a part of a file in which `torch.save` has written any value.
  explicit TorchFile(FileRange range);

  /// The tensors of the dict; see `named_tensors()`. None for a part of a file.
  const std::vector<std::pair<std::string, PickledTensor>>& tensors() const { return tensors_; }
  const Pickle& pickle() const { return *pickle_; }
  /// Returns the record that has the tensor's elements. Throws `c10::ValueError`, naming the file,
  /// if there is none, or if it has fewer.
  const Record& check(const PickledTensor& tensor) const;
  /// Returns the values, contiguous. Throws `c10::ValueError` if they are not in the file.
  at::Tensor read(const PickledTensor& tensor) const;
  /// Reads bytes of a contiguous tensor.
  void read_bytes_of(const PickledTensor& tensor, int64_t offset, size_t nbytes, void* out) const;

  const std::string& path() const { return file_.file->path(); }

 private:
  std::string read_record(const std::string& name, int64_t most,
                          const std::optional<std::string>& otherwise = std::nullopt) const;
  const Record& storage_of(const PickledTensor& tensor) const;
  void count_bytes(const PickledTensor& tensor, std::set<PickledTensor>& seen,
                   std::map<std::string, int64_t>& used) const;

  FileRange file_;
  std::map<std::string, Record> records_;  // by their names in the zip file
  std::shared_ptr<const Pickle> pickle_;
  std::vector<std::pair<std::string, PickledTensor>> tensors_;
};

}  // namespace tessera
