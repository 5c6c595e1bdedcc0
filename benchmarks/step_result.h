#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/step_bench.h"

namespace tessera::tools {

/// The answers of the processes of one kind: one entry per rank.
struct RoleResult {
  std::vector<nlohmann::json> prepared;
  std::vector<std::vector<nlohmann::json>> turns;
  std::vector<nlohmann::json> memory;

  /// Returns the median seconds of the steps of one turn over all ranks.
  double turn_median(int turn) const;
  /// Returns the mean seconds of the steps of one turn over all ranks.
  double turn_mean(int turn) const;

  /// Returns the seconds of all timed steps of all ranks.
  std::vector<double> seconds() const;
  /// Returns the same of one of the parts of a step, in the same order.
  std::vector<double> part_seconds(const std::string& part) const;
};

/// Returns the median of the time of `local`'s steps, had the optimizer worked on the part of one
/// of `ranks` ranks only.
double limit_seconds(const RoleResult& local, int ranks);

struct StepResult {
  int warmup_steps = 0;
  RoleResult sharded;
  RoleResult local;
  std::optional<RoleResult> in_step;
  std::optional<RoleResult> native;
  std::optional<RoleResult> threads;
  std::vector<double> core_noise;  ///< before each turn: as many in each round
};

/// Lets the processes of each kind that `options` select take turns. Throws `c10::ValueError` for
/// options that do not exist.
StepResult measure_steps(const StepBenchOptions& options);

}  // namespace tessera::tools
