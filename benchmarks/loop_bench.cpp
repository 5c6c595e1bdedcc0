#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "benchmarks/loop.h"
#include "benchmarks/median.h"
#include "benchmarks/step_bench.h"
#include "benchmarks/step_report.h"
#include "benchmarks/trainer.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

ordered_json parts_ms(const RoleResult& role) {
  ordered_json parts;
  for (const char* name : kStepParts) parts[name] = 1e3 * mean_of(role.part_seconds(name));
  return parts;
}

ordered_json loop_result(const std::string& loop, const StepResult& result) {
  const auto sharded = result.roles.at(StepRole::kSharded).turn_means();
  ordered_json seconds, ratios, parts;
  for (const auto& [role, of_role] : result.roles) {
    const auto means = of_role.turn_means();
    seconds[to_string(role)] = median_of(means);
    parts[to_string(role)] = parts_ms(of_role);
    if (role != StepRole::kSharded)
      ratios[to_string(role)] = ratio_of_rounds(ratios_of(sharded, means));
  }
  return {{"loop", loop},
          {"seconds", seconds},
          {"ratio_to", ratios},
          {"parts_ms", parts},
          {"core_noise", median_of(result.core_noise)}};
}

std::string loop_line(const ordered_json& result) {
  auto line = fmt::format("{:<12}{:>10.4f}", text_of(result, "loop"),
                          result["seconds"]["sharded"].get<double>());
  for (const auto& [name, ratio] : result["ratio_to"].items())
    line += fmt::format("{:>8.3f} ({:.3f} to {:.3f})", ratio["median"].get<double>(),
                        ratio["low"].get<double>(), ratio["high"].get<double>());
  return line + "\n";
}

std::string loop_table(const ordered_json& report) {
  const auto text = [&](const char* key) { return text_of(report, key); };
  auto table = fmt::format(
      "{}, level {}, {} ranks over {}, {} rounds of {} steps: medians (intervals of 95 %)\n"
      "{:<12}{:>10}{:>25}{:>25}{:>25}\n",
      text("size"), text("level"), text("ranks"), text("transport"), text("rounds"), text("steps"),
      "loop", "s a step", "to local", "to local in step", "to as many threads");
  for (const auto& result : report["loops"]) table += loop_line(result);
  return table;
}

}  // namespace

int bench_loop(const StepBenchOptions& options, std::vector<std::string> loops) {
  if (loops.empty()) {
    loops = {"none"};
    for (const auto& [name, member] : kLoopSwitches) loops.emplace_back(name);
    loops.emplace_back("all");
  }
  std::vector<StepBenchOptions> steps(loops.size(), options);
  for (size_t i = 0; i < loops.size(); ++i) {
    steps[i].loop = loops[i];
    step_bench_plan(steps[i]);  // throws before any loop is measured
  }
  auto report = report_head("loop", options);
  report["loops"] = ordered_json::array();
  for (const auto& step : steps) {
    report["loops"].push_back(loop_result(step.loop, measure_steps(step)));
    if (!step.json) fmt::print(stderr, "{}", loop_line(report["loops"].back()));
  }
  report.update(report_origin());
  fmt::print("{}\n", options.json ? report.dump() : loop_table(report));
  return 0;
}

}  // namespace tessera::tools
