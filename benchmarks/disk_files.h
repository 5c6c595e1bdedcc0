#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tessera::tools {

/// Writes the bytes in blocks of 1 MiB to a new file, which replaces the old one once they are on
/// the disk: `dd bs=1M conv=fsync` and `mv`. Throws `std::system_error`.
void write_to_disk(const std::string& file, const std::vector<char>& bytes);

/// Reads the file in blocks of 1 MiB into `bytes`.
void read_from_disk(const std::string& file, std::vector<char>& bytes);

/// Makes the system drop the cached contents of all files in a directory, so that they are read
/// from the disk. (Contents that are not on the disk yet stay.)
void drop_from_cache(const std::string& directory);

}  // namespace tessera::tools
