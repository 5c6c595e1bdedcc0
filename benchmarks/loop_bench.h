#pragma once

#include <string>
#include <vector>

#include "benchmarks/step_bench.h"

namespace tessera::tools {

/// The options of `tessera bench loop`.
struct LoopBenchOptions {
  StepBenchOptions step = {
      .rounds = 10, .steps = 10, .memory = false, .in_step = true, .threads = true};
  std::vector<std::string> loops;  ///< see `loop_switches()`; empty: none, each switch, and all
};

/// Measures the steps of loops as users write them, by `measure_steps()`: those of a sharded job
/// against local processes, against local processes that wait for each other once a step, and
/// against one process with as many threads that trains on the batches of all ranks. Prints a
/// table, or one line of JSON, to stdout and progress to stderr. Returns the exit status; throws
/// `c10::ValueError` for options that do not exist.
///
/// The number of a round is that of all its steps together, because the work of every tenth step
/// counts, too; the ratios are medians over the rounds, with an interval (`median_interval()`).
int bench_loop(const LoopBenchOptions& options);

}  // namespace tessera::tools
