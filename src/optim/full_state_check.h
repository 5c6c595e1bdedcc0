#pragma once

#include <tessera/sharded_optimizer.h>

namespace tessera {

/// Throws `c10::NotImplementedError` for parameters that are DistTensors, and unless the optimizer
/// has the parameters that it was sharded with. `function`: for messages.
void check_segments(const ShardedOptimizer& optimizer, const char* function);

}  // namespace tessera
