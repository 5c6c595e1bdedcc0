#include "tracer/memory_recorder.h"

#include <tessera/process_memory.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "group/process_time.h"

namespace tessera {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::min();

// True at the bounds of phases only: reading the PSS is slow.
bool reads_pss(MemoryEvent event) {
  switch (event) {
    case MemoryEvent::kStart:
    case MemoryEvent::kForwardBegin:
    case MemoryEvent::kBackwardBegin:
    case MemoryEvent::kBackwardEnd:
    case MemoryEvent::kStepBegin:
    case MemoryEvent::kStepEnd:
      return true;
    default:
      return false;
  }
}

// The time of day at which this process's time began.
int64_t clock_of_start() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count() - process_time_us();
}

// Makes the optimizers' state count as the model's from the start.
const ShardedState& with_optimizer_state(ShardedState& state) {
  state.context().watch.count_optimizer_state();
  return state;
}

}  // namespace

MemoryRecorder::MemoryRecorder(std::shared_ptr<ShardedState> state, bool pss, int64_t steps)
    : state_(std::move(state)),
      pss_(pss),
      steps_(steps),
      count_(with_optimizer_state(*state_)),
      most_other_(kNone) {
  timeline_.rank = state_->mesh().rank();
  timeline_.clock_us = clock_of_start();
  timeline_.knows_other = count_.knows_other();
  on_memory(MemoryEvent::kStart, "");
  state_->context().watch.add(*this);
}

MemoryRecorder::~MemoryRecorder() { state_->context().watch.remove(*this); }

void MemoryRecorder::before_change() { most_other_ = std::max(most_other_, count_.close().other); }

void MemoryRecorder::on_memory(MemoryEvent event, const std::string& unit) {
  const MemoryCount::Now now = count_.take();
  MemorySample sample{.time_us = process_time_us(),
                      .step = step_,
                      .event = event,
                      .unit = unit,
                      .bytes = now.bytes,
                      .peak_other = std::max(std::exchange(most_other_, kNone), now.peak_other)};
  if (pss_ && reads_pss(event)) sample.pss = pss_bytes();
  peak_model_bytes_ = std::max(peak_model_bytes_, sample.bytes.model());
  peak_other_bytes_ = std::max(peak_other_bytes_, sample.peak_other);
  if (timeline_.samples.empty() || peak_bytes(sample) > peak_bytes(peak_)) peak_ = sample;
  timeline_.samples.push_back(std::move(sample));
  if (event == MemoryEvent::kStepEnd) start_step();
}

void MemoryRecorder::start_step() {
  ++step_;
  if (steps_ == 0) return;
  std::erase_if(timeline_.samples,
                [&](const MemorySample& sample) { return sample.step <= step_ - steps_ - 1; });
}

}  // namespace tessera
