#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "model/sharded_state.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// The part of a parameter that this rank updates.
struct Segment {
  ParamIndex place;
  size_t param_group = 0;
  int64_t begin = 0, end = 0;  ///< elements of the unit's flat buffer
  at::Tensor tensor;  ///< 1-D view of the shard; in the parameter's shape under kWholeParam
  at::Tensor held;    ///< what the param group has: `tensor`, or one without elements
  at::Tensor digits;  ///< of master weights, to be restored; mostly undefined
};

/// The segment's reduced gradient; undefined if its parameter has none, or lies elsewhere.
at::Tensor reduced_gradient(ShardedState& state, const Segment& segment);

/// Checks that each parameter of the optimizer is the model's and is in one param group only, and
/// that the optimizer can work on segments. Parameters that `adopted` has are in their places.
/// Changes nothing.
void check_optimizer(const ShardedState& state, const torch::optim::Optimizer& optimizer,
                     const std::vector<Segment>& adopted = {});

/// True if the optimizer's param groups hold `segments`, in that order, and nothing else.
bool has_only(const torch::optim::Optimizer& optimizer, const std::vector<Segment>& segments);

/// Replaces the parameters of the optimizer's param groups by this rank's segments, and cuts the
/// state that it has for them likewise. Parameters that `adopted` has stay as they are.
std::vector<Segment> adopt_optimizer(const ShardedState& state, torch::optim::Optimizer& optimizer,
                                     const std::vector<Segment>& adopted = {});

/// Makes segments of units that have got a master copy since, and their state, part of that.
void follow_thawed(const ShardedState& state, torch::optim::Optimizer& optimizer,
                   const std::vector<Segment>& segments);

/// Lets the param groups hold the user's parameters again. The state stays that of the segments.
void give_back_parameters(const ShardedState& state, torch::optim::Optimizer& optimizer,
                          const std::vector<Segment>& segments);

/// Undoes `adopt_optimizer()`: the param groups hold the user's parameters again, and the optimizer
/// has the state of those that this rank has updated. Throws `c10::NotImplementedError`, and
/// changes nothing, if that is a part of a parameter only.
void give_back_optimizer(const ShardedState& state, torch::optim::Optimizer& optimizer,
                         const std::vector<Segment>& segments);

}  // namespace tessera
