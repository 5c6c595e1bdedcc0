#pragma once

#include <tessera/base/memory_sample.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/export.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

struct MemoryTracerOptions {
  /// Also reads the process's memory (`pss_bytes()`: slow) at the beginning and the end of forward,
  /// backward and step.
  bool pss = false;

  /// Number of past steps whose samples are kept, besides those of the current step; 0: all.
  int64_t steps = 16;
};

/// Samples the memory of a sharded model on this rank, at every event of its units, while it lives:
///
/// ```cpp
/// tessera::MemoryTracer tracer(sharded);
/// for (int step = 0; step < 3; ++step) train(step);
/// tracer.write_svg("memory.svg");
/// tracer.write_chrome_trace("memory.json");
/// ```
///
/// The bytes of the model are exact: the library accounts for them. Activations are the remainder
/// of all tensors that this rank made since the tracer was made: on the CPU, counted as they are
/// allocated and freed (where ranks are threads, those of the calling thread); elsewhere, as the
/// device's allocator reports. They include the memory of any other model. If the process has set a
/// CPU allocator of its own, activations are not known.
///
/// Not collective, and does not change results. It may be made and destroyed at any time, best
/// between two steps; several may live at once. Only the thread that trains may make and destroy
/// it.
class TESSERA_API MemoryTracer {
 public:
  explicit MemoryTracer(const ShardedModule& module, const MemoryTracerOptions& options = {});
  ~MemoryTracer();
  MemoryTracer(MemoryTracer&&) noexcept;
  MemoryTracer& operator=(MemoryTracer&&) noexcept;

  /// Begins the next step. An optimizer's `step()` calls this when it ends.
  void start_step();

  /// The samples in order of time; never empty.
  const std::vector<MemorySample>& samples() const;
  /// The sample with the most bytes, even if it is no longer kept.
  const MemorySample& peak() const;
  /// Maxima of `MemoryBytes::model()` and of `other`. They need not be reached at the same time.
  int64_t peak_model_bytes() const;
  int64_t peak_other_bytes() const;
  /// False if activations are not known; `other` is then 0.
  bool knows_other() const;

  /// Writes the samples as a JSON file for chrome://tracing and Perfetto. Give each rank its own
  /// `path`. All functions that write throw `c10::Error` if a file can't be written.
  void write_chrome_trace(const std::string& path) const;
  /// Writes one such file for all ranks, on rank 0 of the model. Collective; throws on every rank
  /// if the file can't be written.
  void write_merged_chrome_trace(const std::string& path) const;

  /// Draws the last complete step, or all samples if there is none: areas by kind over time, the
  /// units along them, and the peak with its cause.
  void write_svg(const std::string& path) const;

  /// Writes the samples as a table, with the peak above it.
  void dump_memory_stats(const std::string& path) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
