#pragma once

#include <tessera/plan_report.h>

#include <cstdint>
#include <vector>

#include "unit/layout.h"

namespace tessera {

/// True if the unit's full parameters are freed between uses.
bool frees(const UnitLayout& unit, int ranks);

/// What a rank updates of the unit, in elements of its flat buffer.
std::pair<int64_t, int64_t> updated_range(const UnitLayout& unit, int rank);

bool is_trainable(const UnitLayout& unit);

inline int64_t item_size(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

/// How often each unit is gathered in a pass, and the peak of what is gathered.
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
