#include "trace/memory_timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

namespace tessera {

const std::array<MemoryKind, 8> kMemoryKinds = {{
    {"parameters", &MemoryBytes::parameters},
    {"master weights", &MemoryBytes::master_weights},
    {"optimizer state", &MemoryBytes::optimizer_state},
    {"offloaded", &MemoryBytes::offloaded},
    {"gradients", &MemoryBytes::gradients},
    {"gradients in flight", &MemoryBytes::gradients_in_flight},
    {"gathered", &MemoryBytes::gathered},
    {"activations and other", &MemoryBytes::other},
}};

const MemorySample* peak_of(const std::vector<MemorySample>& samples) {
  const auto most = std::ranges::max_element(samples, {}, &MemorySample::peak_total);
  return most == samples.end() ? nullptr : &*most;
}

namespace {

// Open spans, by name and unit.
class OpenSpans {
 public:
  void begin(const char* name, const MemorySample& sample) {
    end(name, sample);
    open_[{name, sample.unit}] = sample.time_us;
  }
  void end(const char* name, const MemorySample& sample) {
    const auto span = open_.find({name, sample.unit});
    if (span == open_.end()) return;
    spans_.push_back({name, sample.unit, span->second, sample.time_us});
    open_.erase(span);
  }
  std::vector<MemorySpan> end_all(int64_t time_us) {
    for (const auto& [key, begin_us] : open_)
      spans_.push_back({key.first, key.second, begin_us, time_us});
    std::stable_sort(spans_.begin(), spans_.end(),
                     [](const auto& a, const auto& b) { return a.begin_us < b.begin_us; });
    return std::move(spans_);
  }

 private:
  std::map<std::pair<std::string, std::string>, int64_t> open_;
  std::vector<MemorySpan> spans_;
};

// The spans that an event ends and begins.
struct SpanEvent {
  MemoryEvent event;
  const char* ended = nullptr;
  const char* begun = nullptr;
};
constexpr std::array<SpanEvent, 10> kSpanEvents = {{
    {MemoryEvent::kForwardBegin, nullptr, "forward"},
    {MemoryEvent::kBackwardBegin, "forward", "backward"},
    {MemoryEvent::kBackwardEnd, "backward"},
    {MemoryEvent::kStepBegin, nullptr, "step"},
    {MemoryEvent::kStepEnd, "step"},
    {MemoryEvent::kGatherStarted, nullptr, "gather"},
    {MemoryEvent::kUnitGathered, "gather", "gathered"},
    {MemoryEvent::kUnitFreed, "gathered"},
    {MemoryEvent::kReductionStarted, nullptr, "reduction"},
    {MemoryEvent::kUnitReduced, "reduction"},
}};

}  // namespace

std::vector<MemorySpan> spans_of(const std::vector<MemorySample>& samples) {
  OpenSpans spans;
  for (const MemorySample& sample : samples) {
    const auto found = std::ranges::find(kSpanEvents, sample.event, &SpanEvent::event);
    if (found == kSpanEvents.end()) continue;
    if (found->ended) spans.end(found->ended, sample);
    if (found->begun) spans.begin(found->begun, sample);
  }
  return spans.end_all(samples.empty() ? 0 : samples.back().time_us);
}

MemoryTimeline last_step_of(const MemoryTimeline& timeline) {
  int64_t step = -1;
  for (const MemorySample& sample : timeline.samples) {
    if (sample.event == MemoryEvent::kStepEnd) step = sample.step;
  }
  if (step < 0) return timeline;
  MemoryTimeline part = timeline;
  std::erase_if(part.samples, [&](const MemorySample& sample) { return sample.step != step; });
  return part;
}

std::string readable_bytes(int64_t nbytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  auto value = static_cast<double>(nbytes);
  for (; std::abs(value) >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", nbytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string memory_table(const MemoryTimeline& timeline) {
  std::string text = fmt::format("rank {}: {} samples\n", timeline.rank, timeline.samples.size());
  if (!timeline.knows_other) {
    text += "activations and other are not known: the process has an allocator of its own\n";
  }
  if (const MemorySample* peak = peak_of(timeline.samples)) {
    text +=
        fmt::format("peak {} bytes, {} of them of the model, in step {}: {} {}\n", peak->peak_total,
                    peak->bytes.model(), peak->step, memory_event_name(peak->event), peak->unit);
  }
  text += fmt::format("{:>14} {:>6}", "time us", "step");
  for (const MemoryKind& kind : kMemoryKinds) text += fmt::format(" {:>21}", kind.name);
  text += fmt::format(" {:>21} {:>14}  {:<18} unit\n", "most of other", "pss", "event");
  for (const MemorySample& sample : timeline.samples) {
    text += fmt::format("{:>14} {:>6}", sample.time_us, sample.step);
    for (const MemoryKind& kind : kMemoryKinds)
      text += fmt::format(" {:>21}", sample.bytes.*kind.bytes);
    text += fmt::format(" {:>21} {:>14}  {:<18} {}\n", sample.peak_other,
                        sample.pss ? std::to_string(*sample.pss) : "-",
                        memory_event_name(sample.event), sample.unit.empty() ? "-" : sample.unit);
  }
  return text;
}

}  // namespace tessera
