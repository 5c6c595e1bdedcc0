#pragma once

#include <tessera/process_group.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <string>
#include <utility>

#include "checkpoint/chunks.h"
#include "checkpoint/directory.h"
#include "checkpoint/pace.h"

namespace tessera {

/// For a new save.
std::string new_save_id();

/// One rank's part in one save. No member is collective: who calls them sees to the order.
///
/// `begin()` on rank 0; then `write()` on all; then `commit()` on rank 0, which waits for the
/// others' parts. A save that goes without a commit leaves what was there before.
class CheckpointWriter {
 public:
  CheckpointWriter(const std::filesystem::path& path, int rank, int size)
      : directory_(path), rank_(rank), size_(size) {}
  ~CheckpointWriter() { directory_.discard(); }

  const std::filesystem::path& draft() const { return directory_.draft(); }
  /// The same on all ranks, and in all files of this save.
  void set_id(std::string id) { id_ = std::move(id); }
  const std::string& id() const { return id_; }

  /// Also removes drafts that killed saves of the same series have left.
  void begin();

  /// Writes this rank's file, if it has anything to store there, and brings it to the disk, and
  /// says so to rank 0, or that it failed. `pace` may be null.
  void write(const RankContents& contents, Pace* pace);

  /// Puts the checkpoint in its place, and removes older ones; see `SaveOptions::keep_last`. Waits
  /// for the ranks as `collect_parts()` does.
  void commit(std::chrono::milliseconds timeout, const std::atomic<bool>& stop);
  void set_keep_last(int keep_last) { keep_last_ = keep_last; }

 private:
  CheckpointIndex write_file(const RankContents& contents, Pace* pace) const;

  CheckpointDirectory directory_;
  int rank_, size_;
  std::string id_;
  int keep_last_ = 0;
};

}  // namespace tessera
