#pragma once

#include <tessera/dist_optimizer.h>
#include <tessera/fully_shard.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace tessera {

/// The optimizer's parameters in the order of its param groups, with the names that
/// `distribute_module` gave them; others are `param 0`, `param 1`, ... by their place.
std::vector<NamedTensor> named_parameters(const torch::optim::Optimizer& optimizer);

/// Makes the state that the first step would make, of zeros, where there is none.
void make_optimizer_state(torch::optim::Optimizer& optimizer);

/// Makes DistTensors of the state of DistTensors, and places it by `place` if that is given.
/// `placed`: the parameters whose state was, which are left out; those that have state are added.
/// On failure nothing is changed.
void place_optimizer_state(torch::optim::Optimizer& optimizer, const StatePlacementFn& place,
                           std::set<const c10::TensorImpl*>& placed);

/// See `DistOptimizer::state_dict()`.
std::map<std::string, at::Tensor> placed_state_dict(torch::optim::Optimizer& optimizer,
                                                    const std::vector<NamedTensor>& params);
std::map<std::string, at::Tensor> sharded_state_dict(ShardedOptimizer& optimizer,
                                                     const std::vector<NamedTensor>& params);

/// Takes what these gave; names and sizes fit.
void load_placed_state(torch::optim::Optimizer& optimizer, const std::vector<NamedTensor>& params,
                       const std::map<std::string, at::Tensor>& state);
void load_sharded_state(ShardedOptimizer& optimizer, const std::vector<NamedTensor>& params,
                        const std::map<std::string, at::Tensor>& state);

}  // namespace tessera
