#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/comm_bench.h"

namespace tessera::tools {

/// One operation at one size.
struct CommMeasurement {
  std::string operation;  ///< all_gather, reduce_scatter, broadcast, all_to_all, memcpy
  std::string by;         ///< tessera, c10d, or memcpy
  int64_t bytes = 0;      ///< of the whole buffer
  double seconds = 0;     ///< median over the rounds of the slowest rank's time
};

/// Returns the numbers that `tessera bench comm --json` prints, one entry per operation and size.
///
/// - `algbw`: bytes / seconds, in GB/s.
/// - `busbw`: algbw times the part of the buffer that each rank must send: (ranks - 1) / ranks for
///   all_gather, reduce_scatter and all_to_all, 1 for broadcast and memcpy. Comparable with the
///   bandwidth of the link, here of the memory: memcpy is run by as many processes at once.
/// - `of_c10d`: for Tessera's own, seconds relative to c10d's for the same operation and size.
nlohmann::ordered_json comm_report(const CommBenchOptions& options,
                                   const std::vector<CommMeasurement>& measurements);

/// The same for human readers.
std::string comm_table(const nlohmann::ordered_json& report);

}  // namespace tessera::tools
