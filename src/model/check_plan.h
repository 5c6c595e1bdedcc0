#pragma once

#include <tessera/shard_plan.h>

#include <vector>

#include "unit/layout.h"

namespace tessera {

/// Throws `c10::ValueError` for fields that can't be carried out with any model.
void check_plan(const ShardPlan& plan);

/// Throws `c10::Error` if a parameter has a gradient that can't be kept; see `Reducer::install()`.
void check_gradients(const std::vector<ParamSlot>& params);

/// Returns the plan with defaults for the fields that it left open. `sends_nothing`: the ranks that
/// it shards over share memory, or there is only one.
ShardPlan with_defaults(ShardPlan plan, bool sends_nothing);

}  // namespace tessera
