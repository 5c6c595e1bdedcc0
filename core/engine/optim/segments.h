#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/sharded_state.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// The part of a parameter that this rank updates.
struct Segment {
  ParamIndex place;
  size_t param_group = 0;
  int64_t begin = 0, end = 0;  ///< elements of the unit's flat buffer
  at::Tensor tensor;           ///< view of the shard, of the shape that `part_sizes()` says
  at::Tensor held;             ///< the tensor in the param group: `tensor`, or one without elements
  at::Tensor digits;           ///< of master weights, to be restored; usually undefined
};

/// Returns true if the matrix, or each matrix of a stack, is whole on one rank, in its own shape.
bool keeps_matrices(const ParamSlot& slot);

/// Returns a copy of the segment's elements of `whole`, a tensor of the parameter's shape, in the
/// segment's shape. This rank must have the segment.
at::Tensor cut_segment(const ParamSlot& slot, const Segment& segment, const at::Tensor& whole);

/// Does so for a tensor of an optimizer's state, of the shape that `state_sizes()` says.
at::Tensor cut_state(const ParamSlot& slot, const Segment& segment, const std::string& name,
                     const at::Tensor& whole);

/// Returns the segment's reduced gradient; undefined if its parameter has none or lies elsewhere.
at::Tensor reduced_gradient(ShardedState& state, const Segment& segment);

/// Checks that each parameter of the optimizer is the model's and is in one param group only, and
/// that the optimizer can work on segments; `elementwise`: the user says that it steps elementwise.
/// Param groups may hold the segments in `adopted` instead of their parameters. Changes nothing.
void check_optimizer(const ShardedState& state, torch::optim::Optimizer& optimizer,
                     bool elementwise, const std::vector<Segment>& adopted = {});

/// Throws `c10::NotImplementedError` if the state of these segments can't be kept as the options of
/// the param groups say now. `on_device`: in the memory of the parameters, not that of the host.
void check_small_state(const ShardedState& state, torch::optim::Optimizer& optimizer,
                       const std::vector<Segment>& segments, bool on_device = false);

/// Returns true if the optimizer's param groups hold `segments`, in that order, and nothing else.
bool has_only(const torch::optim::Optimizer& optimizer, const std::vector<Segment>& segments);

/// Replaces the parameters in the optimizer's param groups by this rank's segments, and cuts the
/// optimizer's state for them likewise. Segments in `adopted` stay as they are.
std::vector<Segment> adopt_optimizer(const ShardedState& state, torch::optim::Optimizer& optimizer,
                                     const std::vector<Segment>& adopted = {});

/// Makes the segments of units that have got a master copy since, and their state, parts of that
/// copy.
void follow_thawed(const ShardedState& state, torch::optim::Optimizer& optimizer,
                   const std::vector<Segment>& segments);

/// Puts the user's parameters back into the param groups. The state stays with the segments.
void give_back_parameters(const ShardedState& state, torch::optim::Optimizer& optimizer,
                          const std::vector<Segment>& segments);

/// Undoes `adopt_optimizer()`: the param groups hold the user's parameters again, and the optimizer
/// has the state of those that this rank has updated. Throws `c10::NotImplementedError`, and
/// changes nothing, if this rank has updated only a part of a parameter.
void give_back_optimizer(const ShardedState& state, torch::optim::Optimizer& optimizer,
                         const std::vector<Segment>& segments);

}  // namespace tessera
