#pragma once

#include <filesystem>
#include <optional>

#include "checkpoint/file.h"

namespace tessera {

/// The place of a checkpoint while a new one is written: `path`, or `checkpoint` in it if that is a
/// mount point, which can't be replaced. See [Note: Replacing a checkpoint] in directory.cpp.
class CheckpointDirectory {
 public:
  explicit CheckpointDirectory(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  /// Where files are written to until `publish()`: a directory beside the checkpoint's, on the same
  /// file system.
  const std::filesystem::path& draft() const { return draft_; }

  /// Makes the empty draft, and holds it against other saves until this object goes. Throws if
  /// something other than a checkpoint is in the way, or if another save holds the draft. One rank.
  void prepare();
  /// Puts the draft in the place of the checkpoint in one step, and removes the old one. One rank.
  void publish();
  /// Removes the draft, as far as that can be done. One rank.
  void discard() noexcept;

 private:
  void check_mount_point() const;
  void take_draft();
  void replace_by_renames() const;

  std::filesystem::path path_;
  std::filesystem::path draft_;
  std::filesystem::path mount_point_;  // that `path_` is in; empty if it was given itself
  std::optional<File> held_;           // the draft's directory, locked
};

/// Removes a checkpoint's files, the index first, and then the directory if nothing else is in it;
/// as far as that can be done.
void remove_checkpoint(const std::filesystem::path& path) noexcept;

/// Removes a draft that a save has left behind, such as one that was killed: one that nobody holds
/// and that has nothing but a checkpoint's files. Where locks are not known, none is removed.
void remove_abandoned_draft(const std::filesystem::path& draft) noexcept;

/// `path`, or what a replacement that was cut off left of it.
std::filesystem::path checkpoint_or_old(const std::filesystem::path& path);
/// The directory to read: that, or what a save to a mount point has put into it.
std::filesystem::path readable_checkpoint(const std::filesystem::path& path);

}  // namespace tessera
