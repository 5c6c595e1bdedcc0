#pragma once

#include <filesystem>

namespace tessera {

/// Removes the oldest checkpoints of the series that `path`, which ends with a number, belongs to,
/// so that `keep` are left; see `SaveOptions::keep_last`. What can't be removed stays.
void remove_older(const std::filesystem::path& path, int keep) noexcept;

}  // namespace tessera
