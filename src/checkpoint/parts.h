#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <string>

#include "checkpoint/index.h"

namespace tessera {

// Ranks hand their parts of the index to rank 0 through files in the draft: so a save in the
// background needs no collective, for which the ranks would have to meet.

/// The end of these files' names.
constexpr const char* kPartSuffix = ".part.json";

/// Reports the data that this rank has written, all of which is on the disk.
void write_part(const std::filesystem::path& draft, int rank, const CheckpointIndex& part);
/// Reports, if possible, that this rank can't write.
void write_failure(const std::filesystem::path& draft, int rank, int size,
                   const std::string& error) noexcept;

/// Waits for all parts, removes their files, and merges them.
///
/// Throws the error of a rank that failed. If the draft does not grow for `timeout`, throws one
/// that names the first rank whose part is missing. Also throws soon after `stop` is set.
CheckpointIndex collect_parts(const std::filesystem::path& draft, int size,
                              std::chrono::milliseconds timeout, const std::atomic<bool>& stop);

}  // namespace tessera
