#pragma once

#include <filesystem>

namespace tessera {

/// The place of a checkpoint while a new one is written. See [Note: Replacing a checkpoint] in
/// directory.cpp.
class CheckpointDirectory {
 public:
  explicit CheckpointDirectory(const std::filesystem::path& path);

  /// Where files are written to until `publish()`: a directory beside the checkpoint's.
  const std::filesystem::path& draft() const { return draft_; }

  /// Makes the empty draft. Throws if something other than a checkpoint is in the way. One rank.
  void prepare() const;
  /// Puts the draft in the place of the checkpoint in one step, and removes the old one. One rank.
  void publish() const;
  /// Removes the draft, as far as that can be done. One rank.
  void discard() const noexcept;

 private:
  void replace_by_renames() const;

  std::filesystem::path path_;
  std::filesystem::path draft_;
};

/// The directory to read: `path`, or what a replacement that was cut off left of it.
std::filesystem::path readable_checkpoint(const std::filesystem::path& path);

}  // namespace tessera
