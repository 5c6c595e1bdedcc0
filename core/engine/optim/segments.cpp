#include "engine/optim/segments.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "engine/grad/grad_gate.h"
#include "engine/optim/cpu_adam_step.h"
#include "engine/optim/optimizer_parameters.h"
#include "engine/optim/param_state.h"
#include "engine/optim/part_state.h"
#include "engine/optim/small_state.h"
#include "engine/optim/state_shape.h"

namespace tessera {
namespace {

std::vector<NamedTensor> parameters_of(const ShardedState& state) {
  std::vector<NamedTensor> params;
  for (const auto& unit : state.units()) {
    for (const ParamSlot& slot : unit->layout().slots) {
      for (size_t i = 0; i < slot.handles.size(); ++i) {
        const at::Tensor tensor = slot.tensor(i);
        if (tensor.defined()) params.push_back({slot.name(), tensor});
      }
    }
  }
  return params;
}

std::string foreign_step_error(const ParamSlot& slot) {
  return "[tessera] the optimizer of a sharded model must be stepped by ShardedOptimizer::step(), "
         "which waits for the gradients, or, after ShardedOptimizer::unwrap(), with the parameters "
         "that it then has again (parameter '" +
         slot.name() + "')";
}

// Where the optimizer updates a wider copy of a parameter than is used, widens the state. It may
// have been made for the narrow one: its sums would lose what the copy keeps.
void widen_state(torch::optim::Optimizer& optimizer, size_t group, const at::Tensor& param,
                 at::ScalarType used) {
  if (param.scalar_type() == used || !knows_state(optimizer)) return;
  const auto dtype = state_dtype(optimizer, optimizer.param_groups()[group], param.scalar_type());
  replace_state_tensors(optimizer, param, [&](const at::Tensor& tensor) {
    const bool is_narrow =
        tensor.is_floating_point() && tensor.itemsize() < c10::elementSize(dtype);
    return is_narrow ? tensor.to(dtype) : tensor;
  });
}

void move_state(torch::optim::Optimizer& optimizer, const at::Tensor& param, const ParamSlot& slot,
                const Segment* segment) {
  if (!has_param_state(optimizer, param)) return;
  if (segment && !slot.dist && segment->tensor.sizes() == param.sizes()) {
    // The state is whole, so it can be moved for any class of optimizers.
    move_param_state(optimizer, param, segment->tensor);
    return widen_state(optimizer, segment->param_group, segment->tensor, slot.dtype);
  }
  if (segment) {
    ParamState state = read_param_state(optimizer, param);
    for (auto& [name, tensor] : state.tensors)
      tensor = cut_state(slot, *segment, name, local_of(tensor));
    write_param_state(optimizer, segment->tensor, state);
    widen_state(optimizer, segment->param_group, segment->tensor, slot.dtype);
  }
  erase_param_state(optimizer, param);
}

// Makes the tensor that the optimizer holds for a parameter on other ranks. Without elements or
// gradient, it only forwards the optimizer's zero_grad() to `slot`: all ranks must clear it alike.
at::Tensor make_placeholder(const ShardedState& state, const ParamIndex& place) {
  const at::Tensor empty = at::as_strided(state.units()[place.unit]->updated(), {0}, {1}, 0);
  install_segment_gate(empty, state.reducer().gradients()[place.unit], place.slot,
                       foreign_step_error(state.slot(place)));
  return empty;
}

// Returns this rank's part of a parameter, as a view of the tensor that its unit updates.
at::Tensor part_of(const Unit& unit, const ParamSlot& slot, const Segment& segment) {
  const at::Tensor& own = unit.updated();
  const int64_t offset = segment.begin - unit.updated_begin() + own.storage_offset();
  return shaped_part(slot, at::as_strided(own, {segment.end - segment.begin}, {1}, offset));
}

Segment make_segment(const ShardedState& state, const ParamIndex& place, size_t param_group) {
  Unit& unit = *state.units()[place.unit];
  const ParamSlot& slot = state.slot(place);
  Segment segment{.place = place, .param_group = param_group};
  std::tie(segment.begin, segment.end) = unit.updated_range(slot);
  if (segment.begin == segment.end) {
    segment.held = make_placeholder(state, place);
    return segment;
  }
  segment.held = segment.tensor = part_of(unit, slot, segment);
  install_segment_gate(segment.tensor, state.reducer().gradients()[place.unit], place.slot,
                       foreign_step_error(slot));
  return segment;
}

// An optimizer that needs whole parameters would step 1-D parts of them without an error.
void check_none_cut(const ShardedState& state, const torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    if (steps_elementwise(optimizer, group)) continue;
    for (const at::Tensor& param : groups[group].params()) {
      const auto place = state.find(param);
      if (!place) continue;  // adopted before
      const ParamSlot& slot = state.slot(*place);
      const bool is_stepped = slot.cut == Cut::kWhole || steps_matrices(optimizer) ||
                              (slot.cut == Cut::kRows && steps_rows(optimizer));
      TORCH_CHECK_NOT_IMPLEMENTED(is_stepped && !slot.dist,
                                  "[ShardedOptimizer] the optimizer must be elementwise, as ranks "
                                  "step parts of parameters ('",
                                  slot.name(), slot.dist ? "' is a DistTensor); " : "' is cut); ",
                                  ways_out_of_cuts(optimizer));
    }
  }
}

// Throws if CPUAdam can't keep the state of a parameter in `kept`; all ranks have the same layouts.
// `on_device`: where the parameter is, even if the unit is offloaded.
void check_small_state(const ShardedState& state, at::ScalarType kept, const ParamIndex& place,
                       bool on_device) {
  if (kept == at::kFloat) return;
  const Unit& unit = *state.units()[place.unit];
  const ParamSlot& slot = state.slot(place);
  const bool is_on_host = !on_device && unit.master().is_offloaded();
  check_small(kept, slot.master_dtype, is_on_host ? at::kCPU : unit.layout().device,
              slot.dist.has_value(), "'" + slot.name() + "'");
  if (kept != at::kByte || unit.layout().level == ShardLevel::kNone) return;
  for (const int64_t bound : unit.layout().bounds) {
    const int64_t at = bound - slot.offset;
    TORCH_CHECK_NOT_IMPLEMENTED(
        at <= 0 || at >= slot.numel || at % kStateBlock == 0,
        "[ShardedOptimizer] CPUAdam's state_dtype Byte needs blocks of ", kStateBlock,
        " elements together on a rank, but '", slot.name(),
        "' is cut inside of one. Shard it with plan.cuts = tessera::cpu_adam_cuts(), the rule "
        "{\"*\", Cut::kElements, 256}");
  }
}

bool is_cpu_adam(const torch::optim::Optimizer& optimizer) {
  return knows_state(optimizer) && optimizer_kind(optimizer) == "CPUAdam";
}

// Returns CPUAdam's `state_dtype` of a param group.
at::ScalarType small_dtype(torch::optim::Optimizer& optimizer, size_t group) {
  const auto options = read_options(optimizer, group);
  const auto it = options.find(kStateDtype);
  return it == options.end() ? at::kFloat : static_cast<at::ScalarType>(it->second);
}

}  // namespace

bool keeps_matrices(const ParamSlot& slot) {
  return slot.cut == Cut::kWhole || (slot.cut == Cut::kRows && slot.sizes.size() == 3);
}

at::Tensor cut_segment(const ParamSlot& slot, const Segment& segment, const at::Tensor& whole) {
  return flat_in_order(whole, slot.strides)
      .narrow(0, segment.begin - slot.offset, segment.end - segment.begin)
      .clone()
      .as_strided(segment.tensor.sizes(), segment.tensor.strides());
}

at::Tensor cut_state(const ParamSlot& slot, const Segment& segment, const std::string& name,
                     const at::Tensor& whole) {
  if (!is_scale(name)) return cut_segment(slot, segment, whole);
  const int64_t begin = (segment.begin - slot.offset) / kStateBlock;
  return whole.narrow(0, begin, blocks_of(segment.end - segment.begin)).clone();
}

at::Tensor reduced_gradient(ShardedState& state, const Segment& segment) {
  const UnitGradients& unit = *state.reducer().gradients()[segment.place.unit];
  if (!segment.tensor.defined() || !unit.is_live(segment.place.slot)) return {};
  return unit.reduced(segment.begin, segment.end);
}

bool has_only(const torch::optim::Optimizer& optimizer, const std::vector<Segment>& segments) {
  size_t next = 0;
  const auto& groups = optimizer.param_groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    for (const at::Tensor& param : groups[group].params()) {
      if (next == segments.size() || !segments[next].held.is_same(param) ||
          segments[next].param_group != group)
        return false;
      ++next;
    }
  }
  return next == segments.size();
}

void check_optimizer(const ShardedState& state, torch::optim::Optimizer& optimizer,
                     bool elementwise, const std::vector<Segment>& adopted) {
  check_class("ShardedOptimizer", optimizer);
  std::vector<NamedTensor> params = parameters_of(state);
  for (const Segment& segment : adopted)
    params.push_back({state.slot(segment.place).name(), segment.held});
  check_optimized_once("ShardedOptimizer", params, {&optimizer});
  if (!elementwise) check_none_cut(state, optimizer);
  if (!is_cpu_adam(optimizer)) return;
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const at::ScalarType kept = small_dtype(optimizer, group);
    for (const at::Tensor& param : optimizer.param_groups()[group].params()) {
      const auto place = state.find(param);
      if (!place) continue;  // adopted before
      // There may be state from before the option was changed.
      const bool has_scales = read_param_state(optimizer, param).tensors.contains("exp_avg_scale");
      check_small_state(state, has_scales ? at::kByte : kept, *place, /*on_device=*/false);
    }
  }
}

void check_small_state(const ShardedState& state, torch::optim::Optimizer& optimizer,
                       const std::vector<Segment>& segments, bool on_device) {
  if (!is_cpu_adam(optimizer)) return;
  std::map<size_t, at::ScalarType> kept;
  for (const Segment& segment : segments) {
    const auto [it, is_new] = kept.try_emplace(segment.param_group);
    if (is_new) it->second = small_dtype(optimizer, segment.param_group);
    check_small_state(state, it->second, segment.place, on_device);
  }
}

void give_back_parameters(const ShardedState& state, torch::optim::Optimizer& optimizer,
                          const std::vector<Segment>& segments) {
  for (auto& param_group : optimizer.param_groups()) param_group.params().clear();
  for (const Segment& segment : segments)
    optimizer.param_groups()[segment.param_group].params().push_back(
        state.slot(segment.place).tensor());
}

void give_back_optimizer(const ShardedState& state, torch::optim::Optimizer& optimizer,
                         const std::vector<Segment>& segments) {
  for (const Segment& segment : segments) {
    const ParamSlot& slot = state.slot(segment.place);
    TORCH_CHECK_NOT_IMPLEMENTED(
        !segment.tensor.defined() || segment.tensor.sizes() == at::IntArrayRef(slot.sizes),
        "[ShardedOptimizer] only whole parameters can be given back; '", slot.name(), "' is cut");
  }
  give_back_parameters(state, optimizer, segments);
  for (const Segment& segment : segments) {
    if (!segment.tensor.defined()) continue;
    unguard_part(optimizer, segment.tensor);
    move_param_state(optimizer, segment.tensor, state.slot(segment.place).tensor());
  }
}

std::vector<Segment> adopt_optimizer(const ShardedState& state, torch::optim::Optimizer& optimizer,
                                     const std::vector<Segment>& adopted) {
  at::NoGradGuard no_grad;
  std::vector<Segment> segments;
  std::map<const c10::TensorImpl*, const Segment*> known_of;  // by the tensor that is held
  for (const Segment& segment : adopted)
    known_of.emplace(segment.held.unsafeGetTensorImpl(), &segment);
  std::set<std::pair<size_t, size_t>> seen;  // tied parameters may be listed more than once
  auto& groups = optimizer.param_groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    std::vector<at::Tensor> replaced;
    for (const at::Tensor& param : groups[group].params()) {
      const auto it = known_of.find(param.unsafeGetTensorImpl());
      const Segment* const known = it == known_of.end() ? nullptr : it->second;
      const ParamIndex place = known ? known->place : *state.find(param);
      if (!seen.emplace(place.unit, place.slot).second) continue;
      Segment segment = known ? *known : make_segment(state, place, group);
      segment.param_group = group;
      if (!known)
        move_state(optimizer, param, state.slot(place),
                   segment.tensor.defined() ? &segment : nullptr);
      replaced.push_back(segment.held);
      segments.push_back(std::move(segment));
    }
    groups[group].params() = std::move(replaced);
  }
  return segments;
}

void follow_thawed(const ShardedState& state, torch::optim::Optimizer& optimizer,
                   const std::vector<Segment>& segments) {
  at::NoGradGuard no_grad;
  for (const Segment& segment : segments) {
    const Unit& unit = *state.units()[segment.place.unit];
    if (segment.held.scalar_type() == unit.updated().scalar_type()) continue;
    if (!segment.tensor.defined()) {
      segment.held.set_data(at::as_strided(unit.updated(), {0}, {1}, 0));
      continue;
    }
    const auto before = segment.tensor.scalar_type();
    segment.tensor.set_data(part_of(unit, state.slot(segment.place), segment));
    widen_state(optimizer, segment.param_group, segment.tensor, before);
  }
}

}  // namespace tessera
