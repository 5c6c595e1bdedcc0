#pragma once

#include <filesystem>

namespace tessera {

// A series is the checkpoints in one directory whose names differ only in the number at their end.

/// Removes the oldest checkpoints of the series of `path`, which ends with a number, so that `keep`
/// are left; see `SaveOptions::keep_last`. Counts only checkpoints that were saved to be removed in
/// this way, and still have the name they were saved under. Errors are ignored.
void remove_older(const std::filesystem::path& path, int keep) noexcept;

/// Removes the drafts that killed saves of the series of `path` left behind; see
/// `remove_abandoned_draft()`.
void remove_abandoned_drafts(const std::filesystem::path& path) noexcept;

}  // namespace tessera
