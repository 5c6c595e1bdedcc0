#pragma once

#include <tessera/sharded_optimizer.h>

#include <vector>

#include "optim/segments.h"

namespace tessera {

/// The segments that a sharded optimizer steps on, for checkpoints: all of its parameters in order,
/// those that do not lie in this rank's shard with an undefined tensor.
const std::vector<Segment>& segments_of(const ShardedOptimizer& optimizer);

/// Moves state that was made outside of the optimizer's steps to where state is offloaded to.
void offload_state(ShardedOptimizer& optimizer);

/// This rank's part of master weights that belong to the optimizer's state, one for each segment:
/// see `restore_digits()`, which is done with them until the next step.
void set_master_digits(ShardedOptimizer& optimizer, std::vector<at::Tensor> parts);

/// Undoes the constructor, where parameters are whole: see `give_back_optimizer()` in segments.h.
/// Nothing else may be asked of the optimizer then.
void give_back_optimizer(ShardedOptimizer& optimizer);

}  // namespace tessera
