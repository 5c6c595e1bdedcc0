#pragma once

#include <vector>

#include "optim/segments.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// True if the next step of `optimizer` on `live` can be left to the gathers that follow it: see
/// [Note: Steps that wait for their use] in deferred_step.cpp.
bool can_defer_step(const ShardedState& state, const torch::optim::Optimizer& optimizer,
                    const std::vector<const Segment*>& live);

/// In place of a fused step on `live`, whose gradients are set: counts it, and gives each unit the
/// updates that it consists of.
void defer_step(ShardedState& state, torch::optim::Optimizer& optimizer,
                const std::vector<const Segment*>& live);

}  // namespace tessera
