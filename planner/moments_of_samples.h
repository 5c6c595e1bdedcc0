#pragma once

#include <tessera/base/memory_sample.h>
#include <tessera/planner/plan_report.h>

#include <vector>

#include "engine/model/sharded_state.h"

namespace tessera {

/// Returns the moments of the last step in these samples of a model that has a unit for each
/// parameter; none if it has no forward or no backward. See `traced_step()`.
std::vector<ActivationMoment> moments_of(ShardedState& state,
                                         const std::vector<MemorySample>& samples);

}  // namespace tessera
