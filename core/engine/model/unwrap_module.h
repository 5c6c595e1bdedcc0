#pragma once

#include "engine/model/sharded_state.h"

namespace tessera {

/// Collective: throws on all ranks if `unwrap()` can't be called now. Does not look for optimizers.
void check_unwrap(ShardedState& state);
/// See `ShardedModule::unwrap()`.
void unwrap(ShardedState& state);

}  // namespace tessera
