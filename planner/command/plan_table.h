#pragma once

#include <fmt/format.h>
#include <tessera/planner/plan_report.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::tools {

/// A report on a plan of one level.
struct LevelReport {
  std::string level;  ///< `none`, `os`, `os_g` or `p_g_os`
  PlanReport report;  ///< if ranks send messages
  PlanReport shared;  ///< if ranks share memory
};

/// Returns a line of a table: a name, and a cell for each column.
template <class Columns, class Cell = std::identity>
std::string line_of(const std::string& name, const Columns& columns, Cell cell = {}) {
  std::string text = fmt::format("{:<34}", name);
  for (const auto& column : columns) text += fmt::format("{:>12}", std::invoke(cell, column));
  return text + "\n";
}

/// The first line: the number of parameters, and the ranks.
std::string plan_heading(const std::vector<ParameterSize>& sizes, const PlanReportOptions& options);

/// A table with a column for each level.
std::string plan_table(const std::vector<LevelReport>& levels, const PlanReportOptions& options);

/// The bytes of a rank's peak, by kind.
nlohmann::ordered_json peak_json(const PlannedRank& rank);

nlohmann::ordered_json plan_json(const std::vector<LevelReport>& levels,
                                 const PlanReportOptions& options);

}  // namespace tessera::tools
