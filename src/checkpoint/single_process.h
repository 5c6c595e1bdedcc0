#pragma once

#include <tessera/checkpoint_files.h>

#include <filesystem>
#include <vector>

#include "checkpoint/chunks.h"

namespace tessera {

/// Counts bytes for a `CheckpointProgress`, which may be empty, and may throw to end the work.
class ProgressCount {
 public:
  ProgressCount(const CheckpointProgress& progress, int64_t total);
  void add(int64_t nbytes);

 private:
  const CheckpointProgress& progress_;
  int64_t done_ = 0, total_;
};

/// Writes a checkpoint as if each of `ranks` had written its contents.
void write_for_all(const std::filesystem::path& path, std::vector<RankContents> ranks,
                   const CheckpointProgress& progress);

}  // namespace tessera
