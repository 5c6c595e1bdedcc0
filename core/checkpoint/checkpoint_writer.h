#pragma once

#include <tessera/checkpoint/checkpoint_files.h>
#include <tessera/comm/process_group.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/chunks.h"
#include "checkpoint/directory.h"
#include "checkpoint/safetensors.h"

namespace tessera {

/// Returns a random id for a new save.
std::string new_save_id();

/// One rank's part in one save. No member is collective; the caller ensures the order:
///
/// `begin()` on rank 0; then `write()` on all ranks; then `commit()` on rank 0: it waits for the
/// other ranks' parts. A save that ends without a commit leaves the previous checkpoint unchanged.
///
/// Ranks hand their parts of the index to rank 0 through files in the draft: so a save in the
/// background needs no collective, for which the ranks would have to meet.
class CheckpointWriter {
 public:
  /// `id`: of the save, the same on all ranks and in all files.
  CheckpointWriter(const std::filesystem::path& path, int rank, int size, std::string id,
                   KeptCheckpoints keep = {})
      : directory_(path), rank_(rank), size_(size), id_(std::move(id)), keep_(std::move(keep)) {}
  ~CheckpointWriter() { directory_.discard(); }

  const std::filesystem::path& draft() const { return directory_.draft(); }

  /// Creates the draft, with a subdirectory for each of several models. Also removes drafts that
  /// killed saves of the same series left behind.
  void begin(std::vector<std::string> models = {});

  /// Writes this rank's files, where it has anything to store, and syncs them to disk; then reports
  /// success or failure to rank 0.
  void write(const RankContents& contents, const BeforeWrite& before_write = {});

  /// Waits for the parts of all ranks, publishes the checkpoint and removes older ones.
  ///
  /// Throws the error of a rank that failed. If the draft does not grow for `timeout`, throws one
  /// that names the first rank whose part is missing. Also throws soon after `stop`, if given, is
  /// set.
  void commit(std::chrono::milliseconds timeout, const std::atomic<bool>* stop = nullptr);

 private:
  CheckpointIndex write_file(const RankContents& contents, const BeforeWrite& before_write) const;
  void report_failure(const std::string& error) const noexcept;
  void write_index(CheckpointIndex index, const std::string& model) const;
  CheckpointIndex collect_parts(const std::string& model, std::chrono::milliseconds timeout,
                                const std::atomic<bool>* stop) const;
  std::filesystem::path part_file(const std::string& model, int rank) const;

  CheckpointDirectory directory_;
  int rank_, size_;
  std::string id_;
  KeptCheckpoints keep_;
  std::vector<std::string> models_;  // on rank 0
};

/// Counts bytes for a `CheckpointProgress`. That may be empty, and may throw to end the work.
class ProgressCount {
 public:
  ProgressCount(const CheckpointProgress& progress, int64_t total)
      : progress_(progress), total_(total) {
    add(0);
  }
  void add(int64_t nbytes) {
    done_ += nbytes;
    if (progress_) progress_(done_, total_);
  }

 private:
  const CheckpointProgress& progress_;
  int64_t done_ = 0, total_;
};

/// Writes a checkpoint in one process, as if each of `ranks` had written its contents.
void write_for_all(const std::filesystem::path& path, const std::vector<RankContents>& ranks,
                   const CheckpointProgress& progress);

}  // namespace tessera
