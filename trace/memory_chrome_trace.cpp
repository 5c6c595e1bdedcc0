#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "trace/memory_timeline.h"

namespace tessera {

// [Note: Chrome's trace events]
//
// A rank is a process of the viewer (pid), so that files of several ranks can be merged. Counters
// ("C") are drawn as stacked areas, in the order of their arguments' names. Forward, backward and
// step follow each other: complete events ("X") on a row. The spans of units overlap, and rows of
// complete events can't show that: they are asynchronous ("b" and "e", matched by category and id).
// Times are microseconds.
namespace {

using nlohmann::json;

enum Row { kPhases = 0, kEvents = 1 };

// The fields that all events have.
json event_of(const char* kind, const MemoryTimeline& timeline, Row row, const std::string& name,
              json args) {
  return {{"ph", kind},
          {"name", name},
          {"pid", timeline.rank},
          {"tid", static_cast<int>(row)},
          {"args", std::move(args)}};
}

json metadata(const MemoryTimeline& timeline) {
  const auto named = [&](const char* what, Row row, const std::string& name) {
    return event_of("M", timeline, row, what, {{"name", name}});
  };
  return {named("process_name", kPhases, fmt::format("rank {}", timeline.rank)),
          named("thread_name", kPhases, "phases"), named("thread_name", kEvents, "events")};
}

json counter(const MemoryTimeline& timeline, const MemorySample& sample) {
  json args = json::object();
  for (size_t i = 0; i < kMemoryKinds.size(); ++i) {
    // The viewer sorts by name and draws no areas below zero.
    args[fmt::format("{} {}", i + 1, kMemoryKinds[i].name)] =
        std::max<int64_t>(sample.bytes.*kMemoryKinds[i].bytes, 0);
  }
  return event_of("C", timeline, kPhases, "memory", std::move(args));
}

json instant(const MemoryTimeline& timeline, const MemorySample& sample) {
  json args = {{"step", sample.step},
               {"unit", sample.unit},
               {"model bytes", sample.bytes.model()},
               {"other bytes", sample.bytes.other},
               {"most other bytes since the last event", sample.peak_other}};
  if (sample.pss) args["pss"] = *sample.pss;
  json event = event_of("i", timeline, kEvents, memory_event_name(sample.event), std::move(args));
  event["s"] = "t";
  event["cat"] = "memory";
  return event;
}

void add_span(json& events, const MemoryTimeline& timeline, const MemorySpan& span, int id,
              int64_t shift_us) {
  json event = {{"cat", span.name},
                {"name", span.unit.empty() ? span.name : span.unit},
                {"pid", timeline.rank},
                {"tid", kPhases},
                {"ts", span.begin_us + shift_us}};
  if (span.unit.empty()) {
    event["ph"] = "X";
    event["dur"] = span.end_us - span.begin_us;
    events.push_back(event);
    return;
  }
  event["id"] = fmt::format("{}.{}", timeline.rank, id);
  event["ph"] = "b";
  events.push_back(event);
  event["ph"] = "e";
  event["ts"] = span.end_us + shift_us;
  events.push_back(event);
}

}  // namespace

json chrome_events(const MemoryTimeline& timeline, int64_t shift_us) {
  json events = metadata(timeline);
  for (const MemorySample& sample : timeline.samples) {
    const auto add = [&](json event) {
      event["ts"] = sample.time_us + shift_us;
      events.push_back(std::move(event));
    };
    add(counter(timeline, sample));
    add(instant(timeline, sample));
    if (sample.pss)
      add(event_of("C", timeline, kPhases, "pss of the process", {{"pss", *sample.pss}}));
  }
  int id = 0;
  for (const MemorySpan& span : spans_of(timeline.samples))
    add_span(events, timeline, span, id++, shift_us);
  return events;
}

std::string chrome_trace(const json& events) {
  return json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump(
             /*indent=*/-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace) +
         "\n";
}

}  // namespace tessera
