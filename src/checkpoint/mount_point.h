#pragma once

#include <filesystem>

namespace tessera {

/// True if a file system, or a part of one, is mounted at this directory, which then can't be
/// renamed or replaced, and whose parent is another file system. False if there is none.
bool is_mount_point(const std::filesystem::path& path);

}  // namespace tessera
