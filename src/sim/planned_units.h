#pragma once

#include <tessera/plan_report.h>

#include <cstdint>
#include <vector>

#include "unit/layout.h"

namespace tessera {

/// Returns true if the unit's full parameters are freed between uses.
bool frees(const UnitLayout& unit, int ranks);

/// Returns the range that a rank updates, in elements of the unit's flat buffer.
std::pair<int64_t, int64_t> updated_range(const UnitLayout& unit, int rank);

bool is_trainable(const UnitLayout& unit);

inline int64_t item_size(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

/// How often each unit is gathered in a pass, and the peak of the gathered bytes.
struct PlannedGathers {
  std::vector<int> forward, backward;  ///< by unit
  std::vector<int> reductions;         ///< units in the order of reductions
  int64_t peak_bytes = 0;
};
PlannedGathers plan_gathers(const std::vector<UnitLayout>& units, const ShardPlan& plan,
                            const PlanReportOptions& options);

ShardMemory planned_memory(const std::vector<UnitLayout>& units, const ShardPlan& plan,
                           const PlanReportOptions& options, int rank);
PlannedTraffic planned_traffic(const std::vector<UnitLayout>& units, const PlannedGathers& gathers,
                               const ShardPlan& plan, const PlanReportOptions& options, int rank);

}  // namespace tessera
