#pragma once

#include <tessera/engine/fully_shard.h>
#include <tessera/export.h>
#include <tessera/planner/plan_report.h>
#include <tessera/trace/memory_tracer.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// A step that was traced on one rank with a small batch.
struct TracedStep {
  int64_t rows = 0;  ///< of the batch
  std::vector<ActivationMoment> moments;
};

/// Returns the moments of the last step that `tracer`, a tracer of `module`, has recorded whole.
/// For `PlanReportOptions::moments` of any model: trace two steps with few rows each, on one
/// machine, and let `traced_moments()` extrapolate.
///
/// ```cpp
/// auto sharded = tessera::fully_shard(model, {.unit_bytes = 0});    // on one rank
/// for (int step = 0; step < 2; ++step) train(small_batch(2));       // the order is learned
/// std::vector<tessera::TracedStep> steps;
/// for (int64_t rows : {2, 4}) {
///   tessera::MemoryTracer tracer(sharded);
///   train(small_batch(rows));
///   steps.push_back(tessera::traced_step(sharded, tracer, rows));
/// }
/// const auto moments = tessera::traced_moments(steps, /*rows=*/64);
/// ```
///
/// Throws `c10::ValueError` unless the model is on one rank and each of its units has one parameter
/// (`unit_bytes = 0`), there is such a step with a forward and a backward, activations are known
/// (`MemoryTracer::knows_other()`), and `rows` is positive.
TESSERA_API TracedStep traced_step(const ShardedModule& module, const MemoryTracer& tracer,
                                   int64_t rows);

/// Returns the moments of a step with `rows` rows. From one step, bytes are taken in proportion to
/// rows. From two with different rows, they lie on a line through both, so that bytes which do not
/// depend on the batch, such as temporary copies of weights, are not multiplied.
///
/// Throws `c10::ValueError` for another number of steps, for two of equal rows or of different
/// moments, and for `rows` below 1.
TESSERA_API std::vector<ActivationMoment> traced_moments(const std::vector<TracedStep>& steps,
                                                         int64_t rows);

/// Writes steps to a JSON file, for `tessera plan --traced`. Throws `c10::Error` if the file can't
/// be written.
TESSERA_API void write_traced_steps(const std::string& path, const std::vector<TracedStep>& steps);
/// Reads such a file. Throws `c10::ValueError` if it is none.
TESSERA_API std::vector<TracedStep> read_traced_steps(const std::string& path);

}  // namespace tessera
