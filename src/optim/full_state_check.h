#pragma once

#include <tessera/sharded_optimizer.h>

namespace tessera {

/// Throws `c10::NotImplementedError` for parameters that are DistTensors or each rank's own
/// (`unreplicated` of the plan). `function`: for messages.
void check_segments(const ShardedOptimizer& optimizer, const char* function);

}  // namespace tessera
