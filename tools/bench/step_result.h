#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/step_bench.h"

namespace tessera::tools {

/// What the processes of one kind answered: one entry per rank.
struct RoleResult {
  std::vector<nlohmann::json> prepared;
  std::vector<std::vector<nlohmann::json>> turns;
  std::vector<nlohmann::json> memory;

  /// Median seconds of the steps of one turn over all ranks.
  double turn_median(int turn) const;
  /// Seconds of one turn by its steps, mean over all ranks.
  double turn_mean(int turn) const;

  /// Seconds of all timed steps of all ranks.
  std::vector<double> seconds() const;
  /// The same of one of the parts of a step, in the same order.
  std::vector<double> part_seconds(const std::string& part) const;
};

struct StepResult {
  int warmup_steps = 0;
  RoleResult sharded;
  RoleResult local;
  std::optional<RoleResult> in_step;
  std::optional<RoleResult> native;
  std::optional<RoleResult> threads;
  std::vector<double> core_noise;  ///< before each turn: as many in each round
};

/// Has the processes of each kind that `options` ask for take turns. Throws `c10::ValueError` for
/// options that do not exist.
StepResult measure_steps(const StepBenchOptions& options);

}  // namespace tessera::tools
