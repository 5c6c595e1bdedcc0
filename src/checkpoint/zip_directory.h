#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "checkpoint/file.h"

namespace tessera {

/// What a zip file that `torch.save` made has in it. LibTorch's own reader believes what the file
/// says of sizes, and takes as much memory before it looks.
class ZipDirectory {
 public:
  /// A record, which is stored as it is.
  struct Record {
    int64_t offset = 0;  ///< of its bytes, from the beginning of the file
    int64_t nbytes = 0;
  };

  /// Throws `c10::ValueError`, without the file's name, for another file, and for one whose records
  /// are compressed or encrypted, lie over each other, or are not in the file.
  explicit ZipDirectory(const File& file);

  /// `name`: without the folder that all records of such a file are in. Null: there is none.
  const Record* find(const std::string& name) const;

 private:
  std::map<std::string, Record> records_;
};

}  // namespace tessera
