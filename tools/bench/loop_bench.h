#pragma once

#include <string>
#include <vector>

#include "bench/step_bench.h"

namespace tessera::tools {

/// What `tessera bench loop` measures.
struct LoopBenchOptions {
  StepBenchOptions step = {
      .rounds = 10, .steps = 10, .memory = false, .in_step = true, .threads = true};
  std::vector<std::string> loops;  ///< see `loop_switches()`; empty: none, each switch, and all
};

/// Measures the steps of loops as users write them, by `measure_steps()`: those of a sharded job
/// against local processes, local processes that wait for each other once a step, and one process
/// with as many threads that trains on the batches of all ranks. Prints a table, or one line of
/// JSON, to stdout and progress to stderr. Returns the exit status; throws `c10::ValueError` for
/// options that do not exist.
///
/// A round's number is that of all its steps together, for what a loop does every tenth step
/// counts, too; the ratios are medians over the rounds, with an interval (`median_interval()`).
int bench_loop(const LoopBenchOptions& options);

}  // namespace tessera::tools
