#pragma once

#include <tessera/memory_tracer.h>

namespace tessera::testing {

/// The most that a rank had in a step.
struct MeasuredPeak {
  MemorySample sample;      ///< of the peak, which has `peak_total` bytes
  int64_t activations = 0;  ///< the most of them, at any time
};

/// Calls `step` some times, and measures the last `steps` of them. The order of use is learned in
/// the first one.
template <class F>
MeasuredPeak measured_peak(const ShardedModule& sharded, int warm_up, int steps, F&& step) {
  for (int i = 0; i < warm_up; ++i) step();
  const MemoryTracer tracer(sharded);
  for (int i = 0; i < steps; ++i) step();
  return {tracer.peak(), tracer.peak_other_bytes()};
}

}  // namespace tessera::testing
