#pragma once

#include <tessera/shard_plan.h>

namespace tessera {

/// Throws `c10::ValueError` for fields that can't be carried out, whatever the model.
void check_plan(const ShardPlan& plan);

/// The plan with what it left open. `sends_nothing`: the ranks that it shards over share memory, or
/// are one.
ShardPlan with_defaults(ShardPlan plan, bool sends_nothing);

}  // namespace tessera
