#pragma once

#include <vector>

#include "engine/model/sharded_state.h"

namespace tessera {

/// See the functions of these names of `ShardedModule`.
std::vector<NamedTensor> full_state(ShardedState& state);
void load_full_state(ShardedState& state, const std::vector<NamedTensor>& given, bool strict);

}  // namespace tessera
