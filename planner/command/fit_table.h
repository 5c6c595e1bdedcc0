#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "planner/command/plan_job.h"
#include "planner/command/remedies.h"

namespace tessera::tools {

/// Whether a job fits: the memory of a step by level, and what would change it.
struct FitReport {
  std::vector<LevelNeed> needs;
  std::vector<bool> fits;
  std::vector<Remedy> remedies;  ///< for the levels that do not fit

  bool any_fits() const;
};

/// Without limits, everything fits.
FitReport fit_report(const PlanJob& job, const std::vector<std::string>& levels,
                     const MemoryLimits& limits);

/// The memory of a step with a column for each level; with limits, the answer.
std::string fit_table(const FitReport& report, const PlanJob& job, const MemoryLimits& limits);
nlohmann::ordered_json fit_json(const FitReport& report, const MemoryLimits& limits);

/// What each number of ranks needs.
using RankTable = std::vector<std::pair<int, std::vector<LevelNeed>>>;

RankTable rank_table(const PlanJob& job, const std::vector<std::string>& levels,
                     const std::vector<int>& ranks);
std::string rank_table_text(const RankTable& table, const MemoryLimits& limits);
nlohmann::ordered_json rank_table_json(const RankTable& table, const MemoryLimits& limits);

/// All that the memory of a step was computed from and that the command does not show elsewhere.
std::string memory_assumptions(const PlanJob& job);
nlohmann::ordered_json activations_json(const PlanJob& job);

}  // namespace tessera::tools
