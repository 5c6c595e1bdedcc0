#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/planner/plan_report.h>

#include <cstdint>
#include <vector>

#include "engine/access/use_order.h"
#include "engine/unit/layout.h"

namespace tessera {

/// Returns a plan with its defaults filled in. Throws if `fully_shard()` refuses it, or if sizes
/// alone do not tell what it does.
ShardPlan foreseeable_plan(const ShardPlan& plan, bool sends_nothing);

/// Returns the units of a model of which only the sizes are known.
std::vector<UnitLayout> planned_units(const std::vector<ParameterSize>& parameters,
                                      const ShardPlan& plan, int ranks);

int64_t item_size(at::ScalarType dtype);
bool is_trainable(const UnitLayout& unit);

/// Returns true if the unit's full parameters are freed between uses. With one rank, its shard is
/// the whole unit.
bool frees(const UnitLayout& unit, int ranks);

/// Returns the bytes of each unit that is freed between uses, and 0 for the others.
std::vector<int64_t> freed_nbytes(const std::vector<UnitLayout>& units, int ranks);

/// Returns the order in which the units are used: that of registration and its reverse if none is
/// given.
PassOrder order_of_use(const std::vector<UnitLayout>& units, const std::vector<int>& forward_order,
                       const std::vector<int>& backward_order);

}  // namespace tessera
