#include "planner/command/plan_table.h"

#include <tessera/engine/plan_fields.h>

#include <functional>
#include <utility>

#include "command/command_line.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

std::string text_of(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

// The names of the table's lines and of the JSON object's keys.
struct Kind {
  const char* line;
  const char* key;
};
constexpr std::pair<Kind, int64_t ShardMemory::*> kMemory[] = {
    {{"parameters", "parameters"}, &ShardMemory::parameters},
    {{"gradients", "gradients"}, &ShardMemory::gradients},
    {{"optimizer state", "optimizer_state"}, &ShardMemory::optimizer_state},
    {{"master weights", "master_weights"}, &ShardMemory::master_weights},
    {{"offloaded", "offloaded"}, &ShardMemory::offloaded}};
constexpr std::pair<Kind, PlannedTraffic::Entry PlannedTraffic::*> kTraffic[] = {
    {{"parameters, for forward", "gather_forward"}, &PlannedTraffic::gather_forward},
    {{"parameters, for backward", "gather_backward"}, &PlannedTraffic::gather_backward},
    {{"parameters, after the step", "gather_updated"}, &PlannedTraffic::gather_updated},
    {{"gradients", "reduce"}, &PlannedTraffic::reduce},
    {{"gradients, reduced, to all", "gather_reduced"}, &PlannedTraffic::gather_reduced},
    {{"gradients, to replicas", "replicate"}, &PlannedTraffic::replicate},
    {{"use of parameters", "agree"}, &PlannedTraffic::agree},
    {{"use of parameters, to replicas", "agree_replicas"}, &PlannedTraffic::agree_replicas}};

using Levels = std::vector<LevelReport>;

std::string bytes_line(const std::string& name, const Levels& levels,
                       const std::function<int64_t(const PlanReport&)>& cell,
                       PlanReport LevelReport::*of = &LevelReport::report) {
  return line_of(name, levels, [&](const LevelReport& level) { return text_of(cell(level.*of)); });
}

int64_t calls_of(const PlannedTraffic& traffic) {
  return traffic.over_ranks().calls() + traffic.over_replicas().calls();
}

std::string memory_lines(const Levels& levels, PlanReport LevelReport::*of) {
  std::string text;
  const auto line = [&](const std::string& name,
                        const std::function<int64_t(const PlanReport&)>& cell) {
    text += bytes_line("  " + name, levels, cell, of);
  };
  for (const auto& [kind, member] : kMemory)
    line(kind.line, [m = member](const PlanReport& report) { return report.rank.memory.*m; });
  line("in all", [](const PlanReport& report) { return report.rank.kept(); });
  line("by the rank with most", [](const PlanReport& report) { return report.fullest.kept(); });
  line("gathered besides, at most",
       [](const PlanReport& report) { return report.rank.memory.peak_unsharded; });
  return text;
}

std::string traffic_lines(const Levels& levels) {
  std::string text;
  for (const auto& [kind, member] : kTraffic)
    text += bytes_line(
        fmt::format("  {}", kind.line), levels,
        [m = member](const PlanReport& report) { return (report.rank.traffic.*m).bytes_sent; });
  text += bytes_line("  in all", levels,
                     [](const PlanReport& report) { return report.rank.traffic.bytes_sent(); });
  text += bytes_line("  by the rank with most", levels,
                     [](const PlanReport& report) { return report.busiest.traffic.bytes_sent(); });
  return text + line_of("collectives per step", levels, [](const LevelReport& level) {
           return fmt::format("{}", calls_of(level.report.rank.traffic));
         });
}

ordered_json memory_json(const PlannedRank& rank) {
  ordered_json memory;
  for (const auto& [kind, member] : kMemory) memory[kind.key] = rank.memory.*member;
  memory["kept"] = rank.kept();
  memory["peak_unsharded"] = rank.memory.peak_unsharded;
  return memory;
}

// For ranks that share memory, and send nothing.
ordered_json shared_json(const PlanReport& report) {
  return {{"rank", memory_json(report.rank)},
          {"keeps_most", memory_json(report.fullest)},
          {"peak", peak_json(report.fullest)}};
}

ordered_json rank_json(const PlannedRank& rank) {
  ordered_json traffic;
  for (const auto& [kind, member] : kTraffic) {
    const auto& entry = rank.traffic.*member;
    traffic[kind.key] = {{"calls", entry.calls}, {"bytes", entry.bytes_sent}};
  }
  traffic["all"] = {{"calls", calls_of(rank.traffic)}, {"bytes", rank.traffic.bytes_sent()}};
  return {{"rank", rank.rank}, {"memory", memory_json(rank)}, {"sent_per_step", traffic}};
}

// The shards of units that are cut anywhere are equal.
ordered_json unit_json(const PlannedUnit& unit) {
  ordered_json json = {{"name", unit.name},
                       {"elements", unit.numel},
                       {"bytes", unit.nbytes},
                       {"trainable", unit.trainable}};
  if (unit.cuts.empty()) return json;
  json["shards"] = unit.shards;
  for (const PlannedCut& cut : unit.cuts) {
    ordered_json& entry = json["cuts"].emplace_back(
        ordered_json{{"name", cut.name}, {"cut", plan_choice(cut.cut).name}});
    if (cut.cut != Cut::kWhole) entry["block"] = cut.block;
    if (cut.owner >= 0) entry["owner"] = cut.owner;
  }
  return json;
}

// The first parameters that may not be cut anywhere.
std::string cut_lines(const PlanReport& report) {
  constexpr size_t kMost = 40;
  std::string text;
  size_t count = 0;
  for (const PlannedUnit& unit : report.units)
    for (const PlannedCut& cut : unit.cuts)
      if (++count <= kMost) text += fmt::format("  {}: {}\n", cut.name, cut.text);
  if (count > kMost) text += fmt::format("  ... and {} more, which --json has\n", count - kMost);
  return count == 0 ? "" : "\nwhere parameters may be cut, unless anywhere\n" + text;
}

}  // namespace

ordered_json peak_json(const PlannedRank& rank) {
  const MemoryBytes& peak = rank.peak;
  return {{"rank", rank.rank},
          {"at", rank.peak_at},
          {"parameters", peak.parameters},
          {"gathered", peak.gathered},
          {"gradients", peak.gradients},
          {"gradients_in_flight", peak.gradients_in_flight},
          {"optimizer_state", peak.optimizer_state},
          {"master_weights", peak.master_weights},
          {"activations", peak.other},
          {"offloaded", peak.offloaded},
          {"device", rank.needed()}};
}

std::string plan_heading(const std::vector<ParameterSize>& sizes,
                         const PlanReportOptions& options) {
  int64_t numel = 0;
  for (const ParameterSize& size : sizes) {
    int64_t product = 1;
    for (const int64_t dim : size.shape) product *= dim;
    numel += product;
  }
  return fmt::format("{} parameters; ranks: {}, replicas: {}\n\n", numel, options.ranks,
                     options.replicas);
}

std::string plan_table(const std::vector<LevelReport>& levels, const PlanReportOptions& options) {
  const PlanReport& first = levels.front().report;
  std::string text =
      fmt::format("{} parameters; ranks: {}, replicas: {}; largest unit: {}\n\n", first.parameters,
                  options.ranks, options.replicas, first.units[first.largest_unit].name);
  text += line_of("", levels, &LevelReport::level);
  text += line_of("units", levels, [](const LevelReport& level) {
    return fmt::format("{}", level.report.units.size());
  });
  text += bytes_line("largest unit", levels, [](const PlanReport& report) {
    return report.units[report.largest_unit].nbytes;
  });
  text += fmt::format("kept by rank {}, if ranks send messages\n", options.rank) +
          memory_lines(levels, &LevelReport::report);
  text += fmt::format("kept by rank {}, if ranks share the memory of their host\n", options.rank) +
          memory_lines(levels, &LevelReport::shared);
  text += fmt::format("sent per step by rank {}, if ranks send messages\n", options.rank) +
          traffic_lines(levels);
  text += line_of("formula of the ZeRO paper", levels, [](const LevelReport& level) {
    return bytes_text(level.report.zero_paper_bytes);
  });
  return text +
         "\nThe paper has gradients in the dtype of parameters, whole at os. The engine keeps "
         "reduced "
         "ones,\nin the dtype that the optimizer updates, and 1/N of them at os, too.\n" +
         cut_lines(first);
}

ordered_json plan_json(const std::vector<LevelReport>& levels, const PlanReportOptions& options) {
  ordered_json columns = ordered_json::array();
  for (const auto& [level, report, shared] : levels) {
    ordered_json units = ordered_json::array();
    for (const PlannedUnit& unit : report.units) units.push_back(unit_json(unit));
    columns.push_back({{"level", level},
                       {"rank", rank_json(report.rank)},
                       {"keeps_most", rank_json(report.fullest)},
                       {"sends_most", rank_json(report.busiest)},
                       {"peak", peak_json(report.fullest)},
                       {"shared_memory", shared_json(shared)},
                       {"largest_unit", unit_json(report.units[report.largest_unit])},
                       {"zero_paper_bytes", report.zero_paper_bytes},
                       {"units", units}});
  }
  return {{"parameters", levels.front().report.parameters},
          {"ranks", options.ranks},
          {"replicas", options.replicas},
          {"levels", columns}};
}

}  // namespace tessera::tools
