#pragma once

#include <tessera/process_group.h>
#include <tessera/shard_plan.h>

#include <functional>
#include <string>
#include <vector>

#include "unit/layout.h"

namespace tessera {

/// Runs `check`, which may throw, on every rank; if it throws on any, all ranks throw, naming the
/// ranks. Collective. For checks of local data: without this, the ranks that pass would wait for
/// the others.
void check_on_all_ranks(ProcessGroup& process_group, const std::function<void()>& check);

/// Throws on every rank unless all of them have the same parameters and plan. The message names the
/// first parameter that differs, and the ranks. Collective.
void check_same_model(ProcessGroup& process_group, const std::vector<ParamSlot>& params,
                      const ShardPlan& plan);

}  // namespace tessera
