#pragma once

#include <filesystem>
#include <optional>

#include "checkpoint/file.h"

namespace tessera {

/// The place of a checkpoint while a new one is written. See [Note: Replacing a checkpoint] in
/// directory.cpp.
class CheckpointDirectory {
 public:
  explicit CheckpointDirectory(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  /// Where files are written to until `publish()`: a directory beside the checkpoint's.
  const std::filesystem::path& draft() const { return draft_; }

  /// Makes the empty draft, and holds it against other saves until this object goes. Throws if
  /// something other than a checkpoint is in the way, or if another save holds the draft. One rank.
  void prepare();
  /// Puts the draft in the place of the checkpoint in one step, and removes the old one. One rank.
  void publish();
  /// Removes the draft, as far as that can be done. One rank.
  void discard() noexcept;

 private:
  void take_draft();
  void replace_by_renames() const;

  std::filesystem::path path_;
  std::filesystem::path draft_;
  std::optional<File> held_;  // the draft's directory, locked
};

/// Removes a checkpoint's files, the index first, and then the directory if nothing else is in it;
/// as far as that can be done.
void remove_checkpoint(const std::filesystem::path& path) noexcept;

/// The directory to read: `path`, or what a replacement that was cut off left of it.
std::filesystem::path readable_checkpoint(const std::filesystem::path& path);

}  // namespace tessera
