#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tessera::tools {

/// Writes the bytes in blocks of 1 MiB to a new file, which replaces the old one when they are on
/// the disk: `dd bs=1M conv=fsync` and `mv`. Throws `std::system_error`.
void write_to_disk(const std::string& file, const std::vector<char>& bytes);

/// Reads the file in blocks of 1 MiB into `bytes`.
void read_from_disk(const std::string& file, std::vector<char>& bytes);

/// Lets the system forget the contents of all files in a directory, so that they are read from the
/// disk. (What is not on the disk yet stays.)
void drop_from_cache(const std::string& directory);

}  // namespace tessera::tools
