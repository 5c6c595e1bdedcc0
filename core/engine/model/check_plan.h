#pragma once

#include <tessera/engine/shard_plan.h>

namespace tessera {

/// Throws `c10::ValueError` for fields that can't be carried out with any model.
void check_plan(const ShardPlan& plan);

/// Returns the plan with defaults for the fields that it left open. `sends_nothing`: the ranks that
/// it shards over share memory, or there is only one.
ShardPlan with_defaults(ShardPlan plan, bool sends_nothing);

}  // namespace tessera
