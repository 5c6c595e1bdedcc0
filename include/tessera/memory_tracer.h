#pragma once

#include <tessera/export.h>
#include <tessera/fully_shard.h>
#include <tessera/memory_sample.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

struct MemoryTracerOptions {
  /// Also read the process's memory (`pss_bytes()`) where forward, backward and step begin and end,
  /// which takes the system a while.
  bool pss = false;

  /// Samples of this many last steps are kept, beside those of the current one; 0: all.
  int64_t steps = 16;
};

/// Samples what a sharded model holds on this rank, at every event of its units, while it lives:
///
/// ```cpp
/// tessera::MemoryTracer tracer(sharded);
/// for (int step = 0; step < 3; ++step) train(step);
/// tracer.write_svg("memory.svg");
/// tracer.write_chrome_trace("memory.json");
/// ```
///
/// What the model holds is exact, by the library's own books. Activations are what remains of all
/// tensors that this rank made since the tracer was: on the CPU counted as they are made and freed,
/// where ranks are threads those made by the calling thread; elsewhere as the device's allocator
/// says. A model beside this one is part of that. If the process has a CPU allocator of its own,
/// they are not known.
///
/// Not collective, and makes no difference to results. It may be made and dropped at any time, best
/// between two steps; several may live at once. Must be made and dropped by the thread that trains.
class TESSERA_API MemoryTracer {
 public:
  explicit MemoryTracer(const ShardedModule& module, const MemoryTracerOptions& options = {});
  ~MemoryTracer();
  MemoryTracer(MemoryTracer&&) noexcept;
  MemoryTracer& operator=(MemoryTracer&&) noexcept;

  /// Begins the next step. An optimizer's `step()` does so by itself when it ends.
  void start_step();

  /// Samples, ascending in time; never empty.
  const std::vector<MemorySample>& samples() const;
  /// The sample with most bytes, also if it is no longer kept.
  const MemorySample& peak() const;
  /// Most bytes of `MemoryBytes::model()` and of `other`, not at the same time.
  int64_t peak_model_bytes() const;
  int64_t peak_other_bytes() const;
  /// False if activations are not known; `other` is 0 then.
  bool knows_other() const;

  /// Writes the samples as a JSON file for chrome://tracing and Perfetto. Give each rank its own
  /// `path`. All of the functions that write throw `c10::Error` if a file can't be written.
  void write_chrome_trace(const std::string& path) const;
  /// One such file of all ranks, which rank 0 of the model writes. Collective; throws on every rank
  /// if it can't be written.
  void write_merged_chrome_trace(const std::string& path) const;

  /// Draws the last whole step, or all samples if there is none: areas by kind over time, the units
  /// along it, and the peak with what caused it.
  void write_svg(const std::string& path) const;

  /// Writes the samples as a table, with the peak above it.
  void dump_memory_stats(const std::string& path) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
