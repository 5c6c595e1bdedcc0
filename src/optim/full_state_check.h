#pragma once

#include <tessera/sharded_optimizer.h>

#include <functional>

#include "mesh/shard_mesh.h"

namespace tessera {

/// As `check_on_all_ranks()`, for all that the user's `save()` and `load()` may throw.
void on_all_ranks(const ShardMesh& mesh, const std::function<void()>& work);

/// Throws `c10::NotImplementedError` for parameters that are DistTensors, and unless the optimizer
/// has the parameters that it was sharded with. `function`: for messages.
void check_segments(const ShardedOptimizer& optimizer, const char* function);

}  // namespace tessera
