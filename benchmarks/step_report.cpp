#include "benchmarks/step_report.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <tessera/version.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <ctime>

#include "benchmarks/median.h"

namespace tessera::tools {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::array kParts = {"zero_grad", "forward", "backward", "optimizer"};

int64_t most(const std::vector<json>& ranks, const char* key) {
  int64_t value = 0;
  for (const auto& rank : ranks) value = std::max(value, rank.at(key).get<int64_t>());
  return value;
}

int64_t peak_pss(const RoleResult& role) {
  return std::max(most(role.prepared, "peak_pss"), most(role.memory, "peak_pss"));
}

// Of the rank that keeps most; the kinds of different ranks are not mixed.
ordered_json kept_bytes(const RoleResult& role) {
  ordered_json kept;
  for (const auto& rank : role.memory) {
    const int64_t parameters = rank.at("parameters"), gradients = rank.at("gradients"),
                  state = rank.at("optimizer_state"), total = parameters + gradients + state;
    if (!kept.is_null() && kept.at("total") >= total) continue;
    kept = {{"parameters", parameters},
            {"gradients", gradients},
            {"optimizer_state", state},
            {"total", total}};
  }
  return kept;
}

// The mean per step, of the rank with the most.
double per_step(const RoleResult& role, const char* key, int steps) {
  double largest = 0;
  for (size_t rank = 0; rank < role.memory.size(); ++rank) {
    double sum = 0;
    for (const auto& turn : role.turns) sum += turn[rank].at(key).get<double>();
    largest = std::max(largest, sum / (role.turns.size() * steps));
  }
  return largest;
}

double final_loss(const RoleResult& role) { return role.turns.back().front().at("loss"); }

ordered_json breakdown_ms(const RoleResult& role) {
  ordered_json breakdown;
  for (const char* part : kParts) breakdown[part] = 1e3 * median_of(role.part_seconds(part));
  return breakdown;
}

// Compares sharded with local processes that wait for each other, too.
ordered_json in_step_times(double sharded_median, const RoleResult& in_step, int ranks) {
  const double median = median_of(in_step.seconds()), limit = limit_seconds(in_step, ranks);
  return {{"in_step_seconds", median},
          {"ratio_to_in_step", sharded_median / median},
          {"in_step_limit_seconds", limit},
          {"ratio_to_in_step_limit", sharded_median / limit}};
}

// Compares a dialect with `fully_shard`.
ordered_json native_times(const RoleResult& sharded, const RoleResult& native) {
  const auto seconds = sharded.seconds(), native_seconds = native.seconds();
  const double median = median_of(native_seconds);
  std::vector<double> ratios;
  for (size_t round = 0; round < sharded.turns.size(); ++round) {
    const int turn = static_cast<int>(round);
    ratios.push_back(sharded.turn_median(turn) / native.turn_median(turn));
  }
  return {{"native_seconds", median},
          {"ratio_to_native", median_of(seconds) / median},
          {"ratio_to_native_of_rounds", ratios},
          {"ratio_to_native_of_minimums",
           std::ranges::min(seconds) / std::ranges::min(native_seconds)}};
}

ordered_json core_noise(const std::vector<double>& samples, int rounds) {
  std::vector<double> of_rounds;
  const auto in_round = static_cast<std::ptrdiff_t>(samples.size()) / rounds;
  for (auto first = samples.begin(); first != samples.end(); first += in_round)
    of_rounds.push_back(*std::max_element(first, first + in_round));
  return {{"core_noise", median_of(samples)}, {"core_noise_of_rounds", of_rounds}};
}

template <class T>
ordered_json both(const T& sharded, const T& local) {
  return {{"sharded", sharded}, {"local", local}};
}

ordered_json times(const StepBenchOptions& options, const StepResult& result) {
  const auto &sharded = result.sharded, &local = result.local;
  const auto sharded_seconds = sharded.seconds(), local_seconds = local.seconds();
  const double median = median_of(sharded_seconds), local_median = median_of(local_seconds);
  const double limit = limit_seconds(local, options.ranks);
  std::vector<double> ratios;
  for (int round = 0; round < options.rounds; ++round) {
    ratios.push_back(sharded.turn_median(round) / local.turn_median(round));
  }
  return {
      {"seconds", both(median, local_median)},
      {"ratio", median / local_median},
      {"ratio_of_rounds", ratios},
      {"ratio_of_minimums", std::ranges::min(sharded_seconds) / std::ranges::min(local_seconds)},
      {"optimizer_seconds", both(median_of(sharded.part_seconds("optimizer")),
                                 median_of(local.part_seconds("optimizer")))},
      {"limit_seconds", limit},
      {"ratio_to_limit", median / limit},
      {"breakdown_ms", both(breakdown_ms(sharded), breakdown_ms(local))}};
}

std::string line(const std::string& name, const ordered_json& numbers, double unit, int digits) {
  const double sharded = numbers.at("sharded"), local = numbers.at("local");
  return fmt::format("{:<34}{:>12.{}f}{:>12.{}f}{:>9.3f}\n", name, sharded / unit, digits,
                     local / unit, digits, local == 0 ? 0.0 : sharded / local);
}

std::string time_lines(const ordered_json& report) {
  const auto& seconds = report.at("seconds");
  auto lines = line("seconds per step (median)", seconds, 1, 4) +
               line(fmt::format("  local with 1/{} of its optimizer", report["ranks"].get<int>()),
                    both(seconds["sharded"], report["limit_seconds"]), 1, 4) +
               fmt::format("{:<58}{:>9.3f}\n", "  of the fastest steps",
                           report["ratio_of_minimums"].get<double>());
  if (report.contains("in_step_seconds")) {
    lines +=
        line("  local, ranks in step", both(seconds["sharded"], report["in_step_seconds"]), 1, 4) +
        line("    with its part of the optimizer",
             both(seconds["sharded"], report["in_step_limit_seconds"]), 1, 4);
  }
  if (report.contains("native_seconds")) {
    lines += line(report["dialect"] == "native" ? "  stepping at once" : "  by fully_shard",
                  both(seconds["sharded"], report["native_seconds"]), 1, 4) +
             fmt::format("{:<58}{:>9.3f}\n", "    of the fastest steps",
                         report["ratio_to_native_of_minimums"].get<double>());
  }
  if (report.contains("threads_seconds")) {
    lines += line("  one process with as many threads",
                  both(seconds["sharded"], report["threads_seconds"]), 1, 4);
  }
  lines += fmt::format("{:<58}{:>9.3f}\n", "  cores by themselves, to their best (median)",
                       report["core_noise"].get<double>());
  const auto& parts = report.at("breakdown_ms");
  for (const char* part : kParts) {
    lines += line(fmt::format("  {} (ms)", part),
                  both(parts["sharded"][part], parts["local"][part]), 1, 2);
  }
  return lines;
}

std::string now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

}  // namespace

ordered_json report_head(const char* bench, const StepBenchOptions& options) {
  return {{"bench", bench},           {"size", options.size},
          {"level", options.level},   {"dialect", options.dialect},
          {"ranks", options.ranks},   {"transport", options.transport},
          {"rounds", options.rounds}, {"steps", options.steps},
          {"quiet", options.quiet}};
}

ordered_json report_origin() {
  return {{"versions",
           {{"tessera", fmt::format("{}.{}.{}", TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR,
                                    TESSERA_VERSION_PATCH)},
            {"torch", TORCH_VERSION}}},
          {"date", now()}};
}

ordered_json ratio_of_rounds(const std::vector<double>& ratios) {
  const auto [low, high] = median_interval(ratios);
  return {{"median", median_of(ratios)}, {"low", low}, {"high", high}, {"of_rounds", ratios}};
}

ordered_json step_report(const StepBenchOptions& options, const StepResult& result) {
  const auto& [warmup_steps, sharded, local, in_step, native, threads, noise] = result;
  auto report = report_head("step", options);
  report.update(
      {{"warmup_steps", warmup_steps}, {"parameters", sharded.prepared.front().at("parameters")}});
  report.update(times(options, result));
  if (in_step) {
    const double median = report.at("seconds").at("sharded");
    report.update(in_step_times(median, *in_step, options.ranks));
  }
  if (native) report.update(native_times(sharded, *native));
  if (threads) {
    const double median = median_of(threads->seconds()),
                 sharded_median = report["seconds"]["sharded"];
    report.update({{"threads_seconds", median}, {"ratio_to_threads", sharded_median / median}});
  }
  report.update(core_noise(noise, options.rounds));
  const auto sharded_pss = peak_pss(sharded), local_pss = peak_pss(local);
  report.update({
      {"kept_bytes", both(kept_bytes(sharded), kept_bytes(local))},
      {"peak_unsharded_bytes", most(sharded.memory, "peak_unsharded")},
      {"peak_in_flight_bytes", most(sharded.memory, "peak_in_flight")},
      {"peak_pss", both(sharded_pss, local_pss)},
      {"peak_pss_ratio", static_cast<double>(sharded_pss) / local_pss},
      {"bytes_sent_per_step", per_step(sharded, "bytes_sent", options.steps)},
      {"page_faults_per_step", both(per_step(sharded, "page_faults", options.steps),
                                    per_step(local, "page_faults", options.steps))},
      {"final_loss", both(final_loss(sharded), final_loss(local))},
      {"unit_bytes", options.unit_bytes},
      {"resident_bytes", options.resident_bytes},
      {"prefetch", options.prefetch},
  });
  report.update(report_origin());
  return report;
}

std::string step_table(const ordered_json& report) {
  const auto& kept = report.at("kept_bytes");
  const auto kept_line = [&](const char* name, const char* kind) {
    return line(name, both(kept["sharded"][kind], kept["local"][kind]), 1e6, 2);
  };
  return fmt::format("{} ({} parameters), level {}, {} ranks over {}, {} rounds of {} steps\n",
                     report["size"].get<std::string>(), report["parameters"].get<int64_t>(),
                     report["level"].get<std::string>(), report["ranks"].get<int>(),
                     report["transport"].get<std::string>(), report["rounds"].get<int>(),
                     report["steps"].get<int>()) +
         fmt::format("{:<34}{:>12}{:>12}{:>9}\n", "", "sharded", "local", "ratio") +
         time_lines(report) + kept_line("kept: parameters (MB)", "parameters") +
         kept_line("kept: gradients (MB)", "gradients") +
         kept_line("kept: optimizer state (MB)", "optimizer_state") +
         kept_line("kept: all (MB)", "total") + line("peak PSS (MB)", report["peak_pss"], 1e6, 1) +
         line("page faults per step", report["page_faults_per_step"], 1, 1) +
         line("final loss of rank 0", report["final_loss"], 1, 6) +
         fmt::format("{:<34}{:>12.3f}\n", "sent per step (MB)",
                     report["bytes_sent_per_step"].get<double>() / 1e6);
}

}  // namespace tessera::tools
