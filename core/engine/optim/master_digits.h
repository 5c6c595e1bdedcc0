#pragma once

#include <tessera/engine/optimizer_state_dict.h>

#include <cstdint>
#include <vector>

#include "engine/optim/segments.h"

namespace tessera {

/// The key of master weights among `OptimizerStateDict::extra`: a `Dict[str, Any]` of whole tensors
/// by parameter number.
inline constexpr const char* kMasterWeights = "master_weights";

/// Adds the master weights of the optimizer's parameters, if there are any, to `state_dict` on
/// ranks that `receive` it, on the CPU. All ranks must call it.
void add_master_weights(ShardedOptimizer& optimizer, bool receives, OptimizerStateDict& state_dict);

/// Returns this rank's parts of the master weights in `state_dict`, one for each segment; undefined
/// where it has none or this model keeps none. `numbers`: from `match_params()`. Throws
/// `c10::ValueError` for other shapes.
std::vector<at::Tensor> cut_master_weights(ShardedOptimizer& optimizer,
                                           const OptimizerStateDict& state_dict,
                                           const std::vector<int64_t>& numbers);

/// Gives the master weights of `segments` their `digits` back. See [Note: Digits of master weights]
/// in master_digits.cpp.
void restore_digits(const ShardedState& state, const std::vector<Segment>& segments);

}  // namespace tessera
