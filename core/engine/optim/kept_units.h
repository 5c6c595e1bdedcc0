#pragma once

#include <cstdint>
#include <vector>

#include "engine/optim/segments.h"

namespace tessera {

/// Moves offloaded units back to the parameters' device, with the optimizer's state for them, as
/// long as they fit into `nbytes`. Returns the bytes that they take there. The optimizer's tensors
/// stay the same objects. See `ShardedOptimizer::keep_on_device`.
int64_t bring_units_back(ShardedState& state, torch::optim::Optimizer& optimizer,
                         const std::vector<Segment>& segments, int64_t nbytes);

/// Returns the bytes of optimizer state for the parameters of units that are not offloaded.
int64_t kept_state_nbytes(const ShardedState& state, const torch::optim::Optimizer& optimizer,
                          const std::vector<Segment>& segments);

}  // namespace tessera
