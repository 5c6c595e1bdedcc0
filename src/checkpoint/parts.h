#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <string>

#include "checkpoint/index.h"

namespace tessera {

// Ranks hand their parts of the index to rank 0 through files in the draft: so a save that goes on
// in the background needs no collective, for which the ranks would have to meet.

/// What the names of these files end with.
constexpr const char* kPartSuffix = ".part.json";

/// Says what this rank has written, all of which is on the disk.
void write_part(const std::filesystem::path& draft, int rank, const CheckpointIndex& part);
/// Says, if that is possible, that this rank can't write.
void write_failure(const std::filesystem::path& draft, int rank, int size,
                   const std::string& error) noexcept;

/// Waits for all parts, removes their files, and merges them.
///
/// Throws a rank's error, or, if the draft does not grow for `timeout`, one that names the ranks
/// whose part is missing; also soon after `stop` is set.
CheckpointIndex collect_parts(const std::filesystem::path& draft, int size,
                              std::chrono::milliseconds timeout, const std::atomic<bool>& stop);

}  // namespace tessera
