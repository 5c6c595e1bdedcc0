#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "checkpoint/file.h"

namespace tessera {

/// The records of a zip file that `torch.save` made. LibTorch's own reader trusts the sizes that
/// the file states, and allocates as much memory before it checks them.
class ZipDirectory {
 public:
  /// A record, which is stored uncompressed.
  struct Record {
    int64_t offset = 0;  ///< of its bytes, from the beginning of the file
    int64_t nbytes = 0;
  };

  /// Throws `c10::ValueError`, without the file's name, if the file is no zip file, or if records
  /// are compressed or encrypted, overlap, or are not in the file.
  explicit ZipDirectory(const File& file);

  /// `name`: without the folder that contains all records of such a file. Null if there is none.
  const Record* find(const std::string& name) const;

 private:
  std::map<std::string, Record> records_;
};

}  // namespace tessera
