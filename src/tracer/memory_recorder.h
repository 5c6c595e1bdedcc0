#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "memory/memory_watch.h"
#include "model/memory_count.h"
#include "tracer/memory_timeline.h"

namespace tessera {

/// Samples the memory that a model holds at each of its events, while the recorder lives.
class MemoryRecorder final : public MemoryListener {
 public:
  /// `pss`: also reads the PSS of the process at the bounds of phases. `steps`: the number of steps
  /// whose samples are kept; 0: all.
  MemoryRecorder(std::shared_ptr<ShardedState> state, bool pss, int64_t steps);
  ~MemoryRecorder() override;
  MemoryRecorder(const MemoryRecorder&) = delete;
  MemoryRecorder& operator=(const MemoryRecorder&) = delete;

  void before_change() override;
  void on_memory(MemoryEvent event, const std::string& unit) override;

  void start_step();
  const MemoryTimeline& timeline() const { return timeline_; }
  const MemorySample& peak() const { return peak_; }
  int64_t peak_model_bytes() const { return peak_model_bytes_; }
  int64_t peak_other_bytes() const { return peak_other_bytes_; }
  ShardedState& state() const { return *state_; }

 private:
  const std::shared_ptr<ShardedState> state_;
  const bool pss_;
  const int64_t steps_;
  MemoryCount count_;
  MemoryTimeline timeline_;
  int64_t step_ = 0;
  int64_t most_other_ = 0;  // since the last sample
  MemorySample peak_;
  int64_t peak_model_bytes_ = 0, peak_other_bytes_ = 0;
};

}  // namespace tessera
