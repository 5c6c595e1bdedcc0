#pragma once

#include <tessera/plan_report.h>

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

/// A table with a column for each level.
std::string plan_table(const std::vector<LevelReport>& levels, const PlanReportOptions& options);

nlohmann::ordered_json plan_json(const std::vector<LevelReport>& levels,
                                 const PlanReportOptions& options);

}  // namespace tessera::tools
