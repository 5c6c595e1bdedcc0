#pragma once

#include <filesystem>

namespace tessera {

/// Returns true if a file system, or a part of one, is mounted at this directory: it can't be
/// renamed or replaced then, and its parent is on another file system. False if it does not exist.
bool is_mount_point(const std::filesystem::path& path);

}  // namespace tessera
