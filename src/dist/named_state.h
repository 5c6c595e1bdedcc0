#pragma once

#include <tessera/dist_optimizer.h>
#include <tessera/fully_shard.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace tessera {

/// Returns the optimizer's parameters in the order of its param groups, with the names that
/// `distribute_module` gave them; others are `param 0`, `param 1`, ... by their position.
std::vector<NamedTensor> named_parameters(const torch::optim::Optimizer& optimizer);

/// Creates the state that the first step would create, filled with zeros, where there is none.
void make_optimizer_state(torch::optim::Optimizer& optimizer);

/// Makes DistTensors of the state of DistTensor parameters, and places it by `place` if that is
/// given. `placed`: parameters whose state has been placed; they are skipped, and parameters that
/// have state are added. On failure nothing is changed.
void place_optimizer_state(torch::optim::Optimizer& optimizer, const StatePlacementFn& place,
                           std::set<const c10::TensorImpl*>& placed);

/// See `DistOptimizer::state_dict()`.
std::map<std::string, at::Tensor> placed_state_dict(torch::optim::Optimizer& optimizer,
                                                    const std::vector<NamedTensor>& params);
std::map<std::string, at::Tensor> sharded_state_dict(ShardedOptimizer& optimizer,
                                                     const std::vector<NamedTensor>& params);

/// Load the result of the functions above; names and sizes must fit.
void load_placed_state(torch::optim::Optimizer& optimizer, const std::vector<NamedTensor>& params,
                       const std::map<std::string, at::Tensor>& state);
void load_sharded_state(ShardedOptimizer& optimizer, const std::vector<NamedTensor>& params,
                        const std::map<std::string, at::Tensor>& state);

}  // namespace tessera
