#pragma once

#include <vector>

namespace tessera::tools {

/// The options of `tessera bench comm`. `comm_report()` describes the numbers.
struct CommBenchOptions {
  std::vector<int> sizes = {1, 4, 16, 64};  ///< of the whole buffer, in MiB
  int ranks = 2;
  int rounds = 7;  ///< turns of each operation
  bool json = false;
};

/// Measures Tessera's collectives over Gloo, c10d's own on connections of the same kind, and
/// memcpy, with a process per rank on this machine.
///
/// All operations take turns in every round, so that a machine that gets slower or faster meanwhile
/// does so for all. Prints a table, or one line of JSON, to stdout. Returns the exit status; throws
/// `c10::ValueError` for invalid sizes and counts.
int bench_comm(const CommBenchOptions& options);

/// Runs one rank of such a measurement; rank 0 prints the numbers as a line of JSON.
int bench_comm_worker(const CommBenchOptions& options);

}  // namespace tessera::tools
