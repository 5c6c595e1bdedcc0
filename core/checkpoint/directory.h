#pragma once

#include <tessera/checkpoint/checkpoint.h>

#include <filesystem>
#include <optional>
#include <vector>

#include "base/files/file.h"

namespace tessera {

/// The checkpoints of a series that a save keeps; see `SaveOptions`.
struct KeptCheckpoints {
  int last = 0;
  std::optional<BestBy> best = std::nullopt;
};

/// The location of a checkpoint while a new one is written: `path`, or its subdirectory
/// `checkpoint` if `path` is a mount point and can't be replaced.
/// See [Note: Replacing a checkpoint] in directory.cpp.
class CheckpointDirectory {
 public:
  explicit CheckpointDirectory(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  /// The directory that files are written to until `publish()`: beside the checkpoint's, on the
  /// same file system.
  const std::filesystem::path& draft() const { return draft_; }

  /// Creates the empty draft and locks it against other saves until it is published or this object
  /// is destroyed. Throws if something other than a checkpoint is in the way, or if another save
  /// holds the draft. Called on one rank.
  void prepare();
  /// Replaces the checkpoint by the draft in one step, and removes the old one; then, as far as
  /// possible, the oldest ones of its series but those to keep. Called on one rank.
  void publish(const KeptCheckpoints& keep = {});
  /// Removes the draft, as far as possible. Called on one rank.
  void discard() noexcept;

 private:
  void take_draft();
  void replace_by_renames() const;

  std::filesystem::path path_;
  std::filesystem::path draft_;
  std::filesystem::path mount_point_;  // the given mount point, with `path_` inside; else empty
  std::optional<File> held_;           // the draft's directory, locked
  std::vector<std::filesystem::path> created_in_;  // where new directories lead to the draft's
};

/// Returns the directory to read: `path`, or the old checkpoint if its replacement was interrupted,
/// or the one that a save to a mount point put into `path`.
std::filesystem::path readable_checkpoint(const std::filesystem::path& path);

/// Returns true if a load from `path` finds a checkpoint; false for what can't be looked at.
bool holds_checkpoint(const std::filesystem::path& path);

/// Returns true for the name of a directory in which a save works, or that one has left.
bool is_unfinished(const std::filesystem::path& path);

/// Orders names by their beginnings, and equal ones by the numbers at their ends: `step-9` comes
/// before `step-10`.
bool is_before(const std::filesystem::path& a, const std::filesystem::path& b);

/// Removes the drafts that killed saves of the series of `path`, an absolute one, left behind.
void remove_abandoned_drafts(const std::filesystem::path& path) noexcept;

}  // namespace tessera
