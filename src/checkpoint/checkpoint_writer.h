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

/// Returns a random id for a new save.
std::string new_save_id();

/// One rank's part in one save. No member is collective; the caller ensures the order:
///
/// `begin()` on rank 0; then `write()` on all ranks; then `commit()` on rank 0, which waits for the
/// other ranks' parts. A save that ends without a commit leaves the previous checkpoint unchanged.
class CheckpointWriter {
 public:
  CheckpointWriter(const std::filesystem::path& path, int rank, int size)
      : directory_(path), rank_(rank), size_(size) {}
  ~CheckpointWriter() { directory_.discard(); }

  const std::filesystem::path& draft() const { return directory_.draft(); }
  /// Sets the save's id, the same on all ranks and in all files of this save.
  void set_id(std::string id) { id_ = std::move(id); }
  const std::string& id() const { return id_; }

  /// Creates the draft. Also removes drafts that killed saves of the same series left behind.
  void begin();

  /// Writes this rank's file, if it has anything to store there, and syncs it to disk; then reports
  /// success or failure to rank 0. `pace` may be null.
  void write(const RankContents& contents, Pace* pace);

  /// Publishes the checkpoint and removes older ones; see `SaveOptions::keep_last`. Waits for the
  /// ranks as `collect_parts()` does.
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
