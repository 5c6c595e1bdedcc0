#include <fmt/format.h>
#include <tessera/planner/plan_report.h>

#include <algorithm>

#include "benchmarks/link_bench.h"
#include "benchmarks/median.h"
#include "benchmarks/step_report.h"
#include "benchmarks/workload.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

double formula_nbytes(const LinkBenchOptions& options, const std::string& transport) {
  const auto sizes = parameter_sizes(*make_bench_model(options.step.size));
  const auto bytes_of_rank = [&](int ranks) {
    const auto report = plan_report(sizes, step_bench_plan(options.step), {.ranks = ranks});
    return static_cast<double>(report.busiest.traffic.bytes_sent());
  };
  if (transport.starts_with("arena+")) return bytes_of_rank(options.hosts);
  const int ranks = options.ranks(), local = options.ranks_per_host;
  return bytes_of_rank(ranks) * local * (ranks - local) / (ranks - 1);
}

ordered_json against(const LinkResult& result, const LinkResult::Job& other) {
  return {{"seconds", median_of(other.role.seconds())},
          {"wire_nbytes", median_of(other.wire_nbytes)},
          {"ratio", ratio_of_rounds(
                        ratios_of(other.role.turn_medians(), result.sharded.role.turn_medians()))}};
}

std::string interval(const ordered_json& ratio) {
  return fmt::format("{:.3f} [{:.3f}, {:.3f}]", ratio["median"].get<double>(),
                     ratio["low"].get<double>(), ratio["high"].get<double>());
}

}  // namespace

ordered_json link_report(const LinkBenchOptions& options, const LinkResult& result) {
  StepBenchOptions step = options.step;
  step.ranks = options.ranks();
  auto report = report_head("link", step);
  const auto& [sharded, local, beside, transfers, beside_seconds, others, transport] = result;
  const double compute = limit_seconds(local, step.ranks);
  std::vector<double> links, rooflines, both;
  for (size_t round = 0; round < transfers.size(); ++round) {
    const auto alone = [&](const RoleResult& role) {
      return limit_seconds({.turns = {role.turns[round]}}, step.ranks);
    };
    links.push_back(options.mbit > 0 ? sharded.wire_nbytes[round] * 8 / (options.mbit * 1e6)
                                     : transfers[round]);
    rooflines.push_back(std::max(links.back(), alone(local)));
    both.push_back(std::max(beside_seconds[round], alone(beside)));
  }
  const auto steps = sharded.role.turn_medians();
  const double wire = median_of(sharded.wire_nbytes), link = median_of(links),
               payload = median_of(sharded.payload_nbytes),
               formula = formula_nbytes(options, transport);
  report.update({{"hosts", options.hosts},
                 {"ranks_per_host", options.ranks_per_host},
                 {"mbit", options.mbit},
                 {"congestion", options.congestion},
                 {"transport", transport},
                 {"parameters", sharded.role.prepared.front().at("parameters")},
                 {"seconds", median_of(sharded.role.seconds())},
                 {"compute_seconds", compute},
                 {"wire_nbytes", wire},
                 {"payload_nbytes", payload},
                 {"formula_nbytes", formula},
                 {"payload_ratio", payload / formula},
                 {"transfer_seconds", median_of(transfers)},
                 {"link_seconds", link},
                 {"roofline_seconds", std::max(compute, link)},
                 {"ratio_to_roofline", ratio_of_rounds(ratios_of(steps, rooflines))},
                 {"both_seconds", median_of(both)},
                 {"ratio_to_both", ratio_of_rounds(ratios_of(steps, both))}});
  for (const auto& [name, other] : others) report["others"][name] = against(result, other);
  report.update(report_origin());
  return report;
}

std::string link_table(const ordered_json& report) {
  const auto value = [&](const char* key) { return text_of(report, key); };
  const auto number = [&](const char* key) { return report.at(key).get<double>(); };
  const auto line = [](const std::string& name, double value, const std::string& more = "") {
    return fmt::format("{:<44}{:>10.4f}  {}\n", name, value, more);
  };
  const double mbit = number("mbit");
  std::string text = fmt::format(
      "{} ({} parameters), level {}, {} hosts with {} ranks each over {}, {}, {}, {} rounds "
      "of {} steps\n",
      value("size"), value("parameters"), value("level"), value("hosts"), value("ranks_per_host"),
      value("transport"), mbit > 0 ? fmt::format("{} Mbit/s", mbit) : "no limit",
      value("congestion"), value("rounds"), value("steps"));
  text += line("computation (s)", number("compute_seconds"));
  text += line(mbit > 0 ? "bytes / bandwidth (s)" : "bytes / measured bandwidth (s)",
               number("link_seconds"));
  text += line("  a transfer of as many bytes (s)", number("transfer_seconds"));
  text += line("step (s)", number("seconds"),
               "by the longer of the two: " + interval(report["ratio_to_roofline"]));
  text += line("  computation and transfer at once (s)", number("both_seconds"),
               "step by this: " + interval(report["ratio_to_both"]));
  text += line("sent per host and step (MB)", number("wire_nbytes") / 1e6,
               fmt::format("without headers {:.4f}, by the formula, {:.4f}: {:.3f}",
                           number("payload_nbytes") / 1e6, number("formula_nbytes") / 1e6,
                           number("payload_ratio")));
  if (report.contains("others")) {
    for (const auto& [name, other] : report["others"].items()) {
      text += line(name + ": step (s)", other["seconds"],
                   "by the step above: " + interval(other["ratio"]));
      text += line("  sent per host and step (MB)", other["wire_nbytes"].get<double>() / 1e6);
    }
  }
  return text;
}

}  // namespace tessera::tools
