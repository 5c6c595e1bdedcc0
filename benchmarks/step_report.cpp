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

// Returns the bytes of the rank that keeps most; the kinds of different ranks are not mixed.
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

// Compares the steps of the sharded job with those of another role, in names with the role's.
ordered_json times_beside(const RoleResult& sharded, const RoleResult& other,
                          const std::string& name, int ranks) {
  const auto seconds = sharded.seconds(), other_seconds = other.seconds();
  const double median = median_of(seconds), other_median = median_of(other_seconds);
  const double limit = limit_seconds(other, ranks);
  return {
      {name + "_seconds", other_median},
      {"ratio_to_" + name, median / other_median},
      {"ratio_to_" + name + "_of_rounds", ratios_of(sharded.turn_medians(), other.turn_medians())},
      {"ratio_to_" + name + "_of_minimums",
       std::ranges::min(seconds) / std::ranges::min(other_seconds)},
      {name + "_limit_seconds", limit},
      {"ratio_to_" + name + "_limit", median / limit}};
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

// Compares the sharded job with the local reference.
ordered_json times(const RoleResult& sharded, const RoleResult& local, int ranks) {
  const auto beside = times_beside(sharded, local, "local", ranks);
  return {{"seconds", both(median_of(sharded.seconds()), median_of(local.seconds()))},
          {"ratio", beside["ratio_to_local"]},
          {"ratio_of_rounds", beside["ratio_to_local_of_rounds"]},
          {"ratio_of_minimums", beside["ratio_to_local_of_minimums"]},
          {"optimizer_seconds", both(median_of(sharded.part_seconds("optimizer")),
                                     median_of(local.part_seconds("optimizer")))},
          {"limit_seconds", beside["local_limit_seconds"]},
          {"ratio_to_limit", beside["ratio_to_local_limit"]},
          {"breakdown_ms", both(breakdown_ms(sharded), breakdown_ms(local))}};
}

std::string line(const std::string& name, const ordered_json& numbers, double unit, int digits) {
  const double sharded = numbers.at("sharded"), local = numbers.at("local");
  return fmt::format("{:<34}{:>12.{}f}{:>12.{}f}{:>9.3f}\n", name, sharded / unit, digits,
                     local / unit, digits, local == 0 ? 0.0 : sharded / local);
}

std::string time_lines(const ordered_json& report) {
  const auto& seconds = report.at("seconds");
  std::string lines = line("seconds per step (median)", seconds, 1, 4);
  const auto add = [&](const std::string& name, const char* key) {
    if (report.contains(key)) lines += line(name, both(seconds["sharded"], report[key]), 1, 4);
  };
  const auto add_ratio = [&](const char* name, const char* key) {
    if (report.contains(key))
      lines += fmt::format("{:<58}{:>9.3f}\n", name, report[key].get<double>());
  };
  add(fmt::format("  local with 1/{} of its optimizer", text_of(report, "ranks")), "limit_seconds");
  add_ratio("  of the fastest steps", "ratio_of_minimums");
  add("  local, ranks in step", "in_step_seconds");
  add("    with its part of the optimizer", "in_step_limit_seconds");
  add("  by fully_shard", "native_seconds");
  add_ratio("    of the fastest steps", "ratio_to_native_of_minimums");
  add("  one process with as many threads", "threads_seconds");
  add_ratio("  cores by themselves, to their best (median)", "core_noise");
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
          {"quiet", options.quiet},   {"optimizer", options.optimizer}};
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

std::string text_of(const ordered_json& report, const char* key) {
  const auto& value = report.at(key);
  return value.is_string() ? value.get<std::string>() : value.dump();
}

ordered_json step_report(const StepBenchOptions& options, const StepResult& result) {
  const RoleResult &sharded = result.roles.at(StepRole::kSharded),
                   &local = result.roles.at(StepRole::kLocal);
  auto report = report_head("step", options);
  report.update(
      {{"warmup_steps", kWarmupSteps}, {"parameters", sharded.prepared.front().at("parameters")}});
  report.update(times(sharded, local, options.ranks));
  for (const auto& [role, other] : result.roles) {
    if (role > StepRole::kLocal)
      report.update(times_beside(sharded, other, to_string(role), options.ranks));
  }
  report.update(core_noise(result.core_noise, options.rounds));
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
  const auto text = [&](const char* key) { return text_of(report, key); };
  return fmt::format("{} ({} parameters), {}, level {}, {} ranks over {}, {} rounds of {} steps\n",
                     text("size"), text("parameters"), text("optimizer"), text("level"),
                     text("ranks"), text("transport"), text("rounds"), text("steps")) +
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
