#pragma once

#include <vector>

#include "engine/model/sharded_state.h"

namespace tessera {

/// Returns a parameter from the elements that each rank updates: `part`, 1-D. Collective.
at::Tensor gather_whole(ShardedState& state, const ParamIndex& place, const at::Tensor& part);

/// See the functions of these names of `ShardedModule`.
at::Tensor full_value(ShardedState& state, const ParamIndex& place);
at::Tensor gather_part(ShardedState& state, const ParamIndex& place, const at::Tensor& part);
at::Tensor cut_part(const ShardedState& state, const ParamIndex& place, const at::Tensor& whole,
                    const char* function);
std::vector<NamedTensor> full_state(ShardedState& state);
void load_full_state(ShardedState& state, const std::vector<NamedTensor>& given, bool strict);

}  // namespace tessera
