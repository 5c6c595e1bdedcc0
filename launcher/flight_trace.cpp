#include "launcher/flight_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

namespace tessera::tools {
namespace {

using nlohmann::json;

json name_event(const char* kind, int pid, int tid, const std::string& name) {
  return {{"ph", "M"}, {"name", kind}, {"pid", pid}, {"tid", tid}, {"args", {{"name", name}}}};
}

json collective_event(const RankFlight& rank, const FlightEntry& entry, int tid) {
  const int64_t end = entry.completed_us.value_or(rank.written_us);
  return {
      {"ph", "X"},
      {"name", entry.subject.empty() ? entry.collective
                                     : fmt::format("{} of {}", entry.collective, entry.subject)},
      {"cat", entry.collective},
      {"pid", rank.rank},
      {"tid", tid},
      {"ts", entry.issued_us},
      {"dur", std::max<int64_t>(0, end - entry.issued_us)},
      {"args",
       {{"number", entry.number},
        {"step", entry.step},
        {"phase", entry.phase},
        {"bytes", entry.bytes},
        {"text", entry.text},
        {"completed", entry.completed_us.has_value()}}}};
}

void add_rank(const RankFlight& rank, json& events) {
  events.push_back(name_event("process_name", rank.rank, 0,
                              rank.host.empty()
                                  ? fmt::format("rank {}", rank.rank)
                                  : fmt::format("rank {} on {}", rank.rank, rank.host)));
  events.push_back({{"ph", "M"},
                    {"name", "process_sort_index"},
                    {"pid", rank.rank},
                    {"tid", 0},
                    {"args", {{"sort_index", rank.rank}}}});
  std::map<std::pair<std::string, std::string>, int> threads;
  for (const FlightEntry& entry : rank.entries)
    threads.emplace(std::pair(entry.group, entry.channel), 0);
  int tid = 0;
  for (auto& [key, number] : threads) {
    number = ++tid;
    events.push_back(
        name_event("thread_name", rank.rank, number, fmt::format("{} {}", key.first, key.second)));
  }
  for (const FlightEntry& entry : rank.entries)
    events.push_back(collective_event(rank, entry, threads[{entry.group, entry.channel}]));
  events.push_back({{"ph", "i"},
                    {"name", rank.reason},
                    {"s", "p"},
                    {"pid", rank.rank},
                    {"tid", 0},
                    {"ts", rank.written_us},
                    {"args", {{"step", rank.step}, {"phase", rank.phase}}}});
}

}  // namespace

std::string flight_trace(const MergedFlight& flight) {
  json trace = {{"displayTimeUnit", "ms"}, {"traceEvents", json::array()}};
  for (const RankFlight& rank : flight.ranks) add_rank(rank, trace["traceEvents"]);
  // A text that was cut inside a character must not make the whole trace unreadable.
  return trace.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace tessera::tools
