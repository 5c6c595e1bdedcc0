#include "benchmarks/loop_bench.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "benchmarks/loop.h"
#include "benchmarks/median.h"
#include "benchmarks/step_report.h"
#include "benchmarks/step_result.h"
#include "benchmarks/trainer.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

std::vector<double> turn_means(const RoleResult& role) {
  std::vector<double> means;
  for (size_t turn = 0; turn < role.turns.size(); ++turn)
    means.push_back(role.turn_mean(static_cast<int>(turn)));
  return means;
}

ordered_json ratio(const RoleResult& sharded, const RoleResult& other) {
  std::vector<double> ratios = turn_means(sharded);
  const auto others = turn_means(other);
  for (size_t turn = 0; turn < ratios.size(); ++turn) ratios[turn] /= others[turn];
  return ratio_of_rounds(ratios);
}

ordered_json parts_ms(const RoleResult& role) {
  ordered_json parts;
  for (const auto& [name, part] : kStepParts) parts[name] = 1e3 * mean_of(role.part_seconds(name));
  return parts;
}

ordered_json loop_result(const std::string& loop, const StepResult& result) {
  ordered_json seconds, ratios, parts;
  const auto add = [&](const char* name, const RoleResult& role) {
    seconds[name] = median_of(turn_means(role));
    parts[name] = parts_ms(role);
    if (&role != &result.sharded) ratios[name] = ratio(result.sharded, role);
  };
  add("sharded", result.sharded);
  add("local", result.local);
  add("in_step", *result.in_step);
  add("threads", *result.threads);
  return {{"loop", loop},
          {"seconds", seconds},
          {"ratio_to", ratios},
          {"parts_ms", parts},
          {"core_noise", median_of(result.core_noise)}};
}

std::string loop_line(const ordered_json& result) {
  auto line = fmt::format("{:<12}{:>10.4f}", result["loop"].get<std::string>(),
                          result["seconds"]["sharded"].get<double>());
  for (const auto& [name, ratio] : result["ratio_to"].items())
    line += fmt::format("{:>8.3f} ({:.3f} to {:.3f})", ratio["median"].get<double>(),
                        ratio["low"].get<double>(), ratio["high"].get<double>());
  return line + "\n";
}

std::string loop_table(const ordered_json& report) {
  auto table = fmt::format(
      "{}, level {}, {} ranks over {}, {} rounds of {} steps: medians (intervals of 95 %)\n"
      "{:<12}{:>10}{:>25}{:>25}{:>25}\n",
      report["size"].get<std::string>(), report["level"].get<std::string>(),
      report["ranks"].get<int>(), report["transport"].get<std::string>(),
      report["rounds"].get<int>(), report["steps"].get<int>(), "loop", "s a step", "to local",
      "to local in step", "to as many threads");
  for (const auto& result : report["loops"]) table += loop_line(result);
  return table;
}

}  // namespace

int bench_loop(const LoopBenchOptions& options) {
  auto loops = options.loops;
  if (loops.empty()) {
    loops = loop_switch_names();
    loops.insert(loops.begin(), "none");
    loops.push_back("all");
  }
  std::vector<StepBenchOptions> steps(loops.size(), options.step);
  for (size_t i = 0; i < loops.size(); ++i) {
    steps[i].loop = loops[i];
    step_bench_plan(steps[i]);  // throws before any loop is measured
  }
  auto report = report_head("loop", options.step);
  report["loops"] = ordered_json::array();
  for (const auto& step : steps) {
    report["loops"].push_back(loop_result(step.loop, measure_steps(step)));
    if (!step.json) fmt::print(stderr, "{}", loop_line(report["loops"].back()));
  }
  report.update(report_origin());
  fmt::print("{}\n", options.step.json ? report.dump() : loop_table(report));
  return 0;
}

}  // namespace tessera::tools
