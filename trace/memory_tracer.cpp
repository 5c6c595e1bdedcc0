#include <c10/util/Exception.h>
#include <tessera/base/process_memory.h>
#include <tessera/trace/memory_tracer.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/files/text_file.h"
#include "base/memory/memory_watch.h"
#include "comm/group/process_time.h"
#include "engine/model/memory_count.h"
#include "engine/model/sharded_state.h"
#include "trace/memory_timeline.h"

namespace tessera {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::min();

// True at the bounds of phases only: reading the PSS is slow.
bool reads_pss(MemoryEvent event) {
  using enum MemoryEvent;
  constexpr std::array kBounds = {kStart,       kForwardBegin, kBackwardBegin,
                                  kBackwardEnd, kStepBegin,    kStepEnd};
  return std::ranges::find(kBounds, event) != kBounds.end();
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

// Samples the memory that a model holds at each of its events, while it lives.
struct MemoryTracer::Impl final : MemoryListener {
  Impl(std::shared_ptr<ShardedState> of, const MemoryTracerOptions& how)
      : state(std::move(of)), options(how), count(with_optimizer_state(*state)) {
    timeline.rank = state->mesh().rank();
    timeline.clock_us = clock_of_start();
    timeline.knows_other = count.knows_other();
    on_memory(MemoryEvent::kStart, "");
    state->context().watch.add(*this);
  }
  ~Impl() override { state->context().watch.remove(*this); }

  void before_change() override {
    const MemoryBytes bytes = count.close();
    most_other = std::max(most_other, bytes.other);
    most_total = std::max(most_total, bytes.total());
  }

  void on_memory(MemoryEvent event, const std::string& unit) override {
    const MemoryCount::Now now = count.take();
    MemorySample sample{.time_us = process_time_us(),
                        .step = step,
                        .event = event,
                        .unit = unit,
                        .bytes = now.bytes,
                        .peak_other = std::max(std::exchange(most_other, kNone), now.peak_other),
                        .peak_total = std::max(std::exchange(most_total, kNone), now.peak_total)};
    if (options.pss && reads_pss(event)) sample.pss = pss_bytes();
    peak_model_bytes = std::max(peak_model_bytes, sample.bytes.model());
    peak_other_bytes = std::max(peak_other_bytes, sample.peak_other);
    if (timeline.samples.empty() || sample.peak_total > peak.peak_total) peak = sample;
    timeline.samples.push_back(std::move(sample));
    if (event == MemoryEvent::kStepEnd) start_step();
  }

  void start_step() {
    ++step;
    if (options.steps == 0) return;
    std::erase_if(timeline.samples, [&](const MemorySample& sample) {
      return sample.step <= step - options.steps - 1;
    });
  }

  const std::shared_ptr<ShardedState> state;
  const MemoryTracerOptions options;
  MemoryCount count;
  MemoryTimeline timeline;
  int64_t step = 0;
  int64_t most_other = kNone, most_total = kNone;  // since the last sample
  MemorySample peak;
  int64_t peak_model_bytes = 0, peak_other_bytes = 0;
};

MemoryTracer::MemoryTracer(const ShardedModule& module, const MemoryTracerOptions& options) {
  TORCH_CHECK_VALUE(options.steps >= 0, "[MemoryTracer] options.steps must not be negative; got ",
                    options.steps);
  impl_ = std::make_unique<Impl>(module.state(), options);
}

MemoryTracer::~MemoryTracer() = default;
MemoryTracer::MemoryTracer(MemoryTracer&&) noexcept = default;
MemoryTracer& MemoryTracer::operator=(MemoryTracer&&) noexcept = default;

void MemoryTracer::start_step() { impl_->start_step(); }

const std::vector<MemorySample>& MemoryTracer::samples() const { return impl_->timeline.samples; }
const MemorySample& MemoryTracer::peak() const { return impl_->peak; }
int64_t MemoryTracer::peak_model_bytes() const { return impl_->peak_model_bytes; }
int64_t MemoryTracer::peak_other_bytes() const { return impl_->peak_other_bytes; }
bool MemoryTracer::knows_other() const { return impl_->timeline.knows_other; }

void MemoryTracer::write_chrome_trace(const std::string& path) const {
  write_text_file("write_chrome_trace", path, chrome_trace(chrome_events(impl_->timeline)));
}

// Each rank's time begins with its process: ranks are aligned by the time of day.
void MemoryTracer::write_merged_chrome_trace(const std::string& path) const {
  using nlohmann::json;
  const ShardMesh& mesh = impl_->state->mesh();
  const MemoryTimeline timeline = impl_->timeline;
  const CollectiveTag tag{"trace of memory", Channel::kControl};
  const auto clocks = mesh.all_gather_bytes(std::to_string(timeline.clock_us), tag);
  int64_t first = timeline.clock_us;
  for (const std::string& clock : clocks) first = std::min<int64_t>(first, std::stoll(clock));
  const auto texts =
      mesh.all_gather_bytes(chrome_trace(chrome_events(timeline, timeline.clock_us - first)), tag);
  check_on_all_ranks(mesh, [&] {
    if (mesh.rank() != 0) return;
    json events = json::array();
    for (const std::string& text : texts) {
      json file = json::parse(text);
      for (json& event : file["traceEvents"]) events.push_back(std::move(event));
    }
    write_text_file("write_merged_chrome_trace", path, chrome_trace(events));
  });
}

void MemoryTracer::write_svg(const std::string& path) const {
  write_text_file("write_svg", path, memory_svg(last_step_of(impl_->timeline)));
}

void MemoryTracer::dump_memory_stats(const std::string& path) const {
  write_text_file("dump_memory_stats", path, memory_table(impl_->timeline));
}

}  // namespace tessera
