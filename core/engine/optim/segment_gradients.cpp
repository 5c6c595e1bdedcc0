#include "engine/optim/segment_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <utility>

#include "base/device/side_stream.h"
#include "engine/model/sharded_state.h"

namespace tessera {
namespace {

at::Tensor pinned_copy(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).pinned_memory(true);
  return at::empty(tensor.sizes(), options).copy_(tensor, /*non_blocking=*/true);
}

using Slots = std::vector<std::vector<bool>>;  // by unit

// Returns the slots of the parameters in the param groups.
Slots slots_of(const ShardedState& state, const torch::optim::Optimizer& optimizer,
               const std::vector<Segment>& segments) {
  Slots own;
  for (const auto& unit : state.units()) own.emplace_back(unit->layout().slots.size(), false);
  const auto add = [&](const ParamIndex& place) { own[place.unit][place.slot] = true; };
  if (has_only(optimizer, segments)) {
    for (const Segment& segment : segments) add(segment.place);
    return own;
  }
  // The user has changed the groups since.
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      const auto known = std::ranges::find_if(
          segments, [&](const Segment& segment) { return segment.held.is_same(param); });
      const auto place = known == segments.end() ? state.find(param) : known->place;
      if (place) add(*place);
    }
  }
  return own;
}

// Calls `f(unit, slot)` with the gradients and the number of each parameter in `own`, or of each
// other one.
template <class F>
void for_each_slot(ShardedState& state, const Slots& own, bool is_own, const F& f) {
  for (size_t unit = 0; unit < own.size(); ++unit) {
    for (size_t slot = 0; slot < own[unit].size(); ++slot)
      if (own[unit][slot] == is_own) f(*state.reducer().gradients()[unit], slot);
  }
}

}  // namespace

void SegmentGradients::begin(ShardedState& state, const std::vector<const Segment*>& segments) {
  if (segments.empty()) return;
  for (const Segment* segment : segments) gradients_.push_back(reduced_gradient(state, *segment));
  const at::Device device = gradients_.front().device();
  if (device == segments.front()->tensor.device()) return;
  copied_ = state.context().copies->of(device).run([&] {
    for (at::Tensor& gradient : gradients_) gradient = pinned_copy(gradient);
  });
}

std::vector<at::Tensor> SegmentGradients::take() {
  if (copied_) copied_->synchronize();
  copied_.reset();
  return std::exchange(gradients_, {});
}

void clear_gradients(ShardedState& state, const torch::optim::Optimizer& optimizer,
                     const std::vector<Segment>& segments, bool set_to_none) {
  at::NoGradGuard no_grad;
  Reducer& reducer = state.reducer();
  const Slots own = slots_of(state, optimizer, segments);
  // Under join(), clears are counted, and must be the same on ranks with other gradients.
  bool all = !state.join_scope();
  for_each_slot(state, own, /*is_own=*/false, [&](const UnitGradients& unit, size_t slot) {
    all = all && !unit.is_reducing() && !unit.has_gradient(slot);
  });
  if (all) return set_to_none ? reducer.clear_all() : reducer.zero_all();
  if (!set_to_none)
    reducer.settle_earlier();  // only then it is known which parameters have gradients
  for_each_slot(state, own, /*is_own=*/true,
                [&](UnitGradients& unit, size_t slot) { unit.zero_grad(slot, set_to_none); });
}

}  // namespace tessera
