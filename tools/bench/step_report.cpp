#include "bench/step_report.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <tessera/version.h>
#include <torch/version.h>

#include <algorithm>
#include <ctime>

namespace tessera::tools {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return 0.5 * (*middle + *std::max_element(values.begin(), middle));
}

std::vector<double> seconds_of(const std::vector<json>& turn) {
  std::vector<double> seconds;
  for (const auto& rank : turn) {
    const auto steps = rank.at("seconds").get<std::vector<double>>();
    seconds.insert(seconds.end(), steps.begin(), steps.end());
  }
  return seconds;
}

int64_t most(const std::vector<json>& ranks, const char* key) {
  int64_t value = 0;
  for (const auto& rank : ranks) value = std::max(value, rank.at(key).get<int64_t>());
  return value;
}

int64_t peak_pss(const RoleResult& role) {
  return std::max(most(role.prepared, "peak_pss"), most(role.memory, "peak_pss"));
}

// Of the rank that keeps most; kinds of different ranks are not mixed.
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

// Mean per step, of the rank with the most.
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

template <class T>
ordered_json both(const T& sharded, const T& local) {
  return {{"sharded", sharded}, {"local", local}};
}

std::string now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

}  // namespace

double RoleResult::turn_median(int turn) const { return median_of(seconds_of(turns[turn])); }

double RoleResult::median() const {
  std::vector<double> all;
  for (const auto& turn : turns) {
    const auto seconds = seconds_of(turn);
    all.insert(all.end(), seconds.begin(), seconds.end());
  }
  return median_of(std::move(all));
}

ordered_json step_report(const StepBenchOptions& options, const StepResult& result) {
  const auto& [warmup_steps, sharded, local] = result;
  std::vector<double> ratios;
  for (int round = 0; round < options.rounds; ++round) {
    ratios.push_back(sharded.turn_median(round) / local.turn_median(round));
  }
  const auto sharded_pss = peak_pss(sharded), local_pss = peak_pss(local);
  return {
      {"bench", "step"},
      {"size", options.size},
      {"level", options.level},
      {"ranks", options.ranks},
      {"transport", options.transport},
      {"rounds", options.rounds},
      {"steps", options.steps},
      {"warmup_steps", warmup_steps},
      {"parameters", sharded.prepared.front().at("parameters")},
      {"seconds", both(sharded.median(), local.median())},
      {"ratio", sharded.median() / local.median()},
      {"ratio_of_rounds", ratios},
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
      {"versions",
       {{"tessera", fmt::format("{}.{}.{}", TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR,
                                TESSERA_VERSION_PATCH)},
        {"torch", TORCH_VERSION}}},
      {"date", now()},
  };
}

std::string step_table(const ordered_json& report) {
  const auto line = [](const char* name, const ordered_json& numbers, double unit, int digits) {
    const double sharded = numbers.at("sharded"), local = numbers.at("local");
    return fmt::format("{:<34}{:>12.{}f}{:>12.{}f}{:>9.3f}\n", name, sharded / unit, digits,
                       local / unit, digits, local == 0 ? 0.0 : sharded / local);
  };
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
         line("seconds per step (median)", report["seconds"], 1, 4) +
         kept_line("kept: parameters (MB)", "parameters") +
         kept_line("kept: gradients (MB)", "gradients") +
         kept_line("kept: optimizer state (MB)", "optimizer_state") +
         kept_line("kept: all (MB)", "total") + line("peak PSS (MB)", report["peak_pss"], 1e6, 1) +
         line("page faults per step", report["page_faults_per_step"], 1, 1) +
         line("final loss of rank 0", report["final_loss"], 1, 6) +
         fmt::format("{:<34}{:>12.3f}\n", "sent per step (MB)",
                     report["bytes_sent_per_step"].get<double>() / 1e6);
}

}  // namespace tessera::tools
