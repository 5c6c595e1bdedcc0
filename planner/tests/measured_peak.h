#pragma once

#include <fmt/format.h>
#include <tessera/trace/memory_tracer.h>

#include <string>

namespace tessera::testing {

/// The most that a rank had in a step.
struct MeasuredPeak {
  MemorySample sample;      ///< of the peak, which has `peak_total` bytes
  int64_t activations = 0;  ///< the most of them, at any time
};

inline std::string text_of(const MemoryBytes& bytes) {
  return fmt::format(
      "{} kB: parameters {}, gathered {}, gradients {}, in flight {}, state {}, "
      "masters {}, activations {}",
      bytes.total() / 1000, bytes.parameters / 1000, bytes.gathered / 1000, bytes.gradients / 1000,
      bytes.gradients_in_flight / 1000, bytes.optimizer_state / 1000, bytes.master_weights / 1000,
      bytes.other / 1000);
}

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
