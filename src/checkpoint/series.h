#pragma once

#include <filesystem>

namespace tessera {

// A series is the checkpoints in one directory whose names differ in the number at their end only.

/// Removes the oldest checkpoints of the series that `path`, which ends with a number, belongs to,
/// so that `keep` are left; see `SaveOptions::keep_last`. Only those count that were saved to be
/// removed in this way, and have the name that they were saved by. What can't be removed stays.
void remove_older(const std::filesystem::path& path, int keep) noexcept;

/// Removes what saves of the series of `path` have left that were killed; see
/// `remove_abandoned_draft()`.
void remove_abandoned_drafts(const std::filesystem::path& path) noexcept;

}  // namespace tessera
