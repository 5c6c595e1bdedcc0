#include "engine/model/model_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "comm/group/progress.h"
#include "engine/grad/clip_grad.h"
#include "engine/model/full_state.h"

namespace tessera {

at::Tensor full_grad(ShardedState& state, const ParamIndex& place) {
  at::NoGradGuard no_grad;
  if (!state.plan().reduce_gradients) return state.slot(place).tensor().grad();
  state.check_no_join("full_grad()");
  state.reducer().settle();
  const UnitGradients& gradients = *state.reducer().gradients()[place.unit];
  if (gradients.is_zero(place.slot) && !gradients.is_live(place.slot)) {
    const UnitLayout& layout = state.units()[place.unit]->layout();
    return at::zeros(state.slot(place).global_sizes(), layout.options().dtype(layout.master_dtype));
  }
  if (!gradients.is_live(place.slot)) return {};
  const auto [begin, end] = state.units()[place.unit]->updated_range(state.slot(place));
  const at::Tensor& all = gradients.reduced();
  return gather_whole(state, place,
                      begin < end ? gradients.reduced(begin, end) : all.narrow(0, 0, 0));
}

void set_full_grad(ShardedState& state, const ParamIndex& place, const at::Tensor& value) {
  at::NoGradGuard no_grad;
  state.check_no_join("set_full_grad()");
  state.reducer().settle();
  const at::Tensor part = cut_part(state, place, value, "set_full_grad");
  const UnitGradients& gradients = *state.reducer().gradients()[place.unit];
  TORCH_CHECK(gradients.is_live(place.slot), "[set_full_grad] '", state.slot(place).name(),
              "' has no reduced gradient that could be set: there must be a backward that uses it "
              "since zero_grad(), and not only under no_sync()");
  const auto [begin, end] = state.units()[place.unit]->updated_range(state.slot(place));
  if (begin < end) gradients.reduced(begin, end).copy_(at::as_strided(part, {end - begin}, {1}));
}

at::Tensor local_grad(ShardedState& state, const ParamIndex& place) {
  state.check_no_join("local_grad()");
  at::NoGradGuard no_grad;
  state.reducer().settle();
  const UnitGradients& gradients = *state.reducer().gradients()[place.unit];
  const ParamSlot& param = state.slot(place);
  const Unit& unit = *state.units()[place.unit];
  const auto [begin, end] = unit.updated_range(param);
  if (begin == end || !gradients.is_live(place.slot)) return {};
  return shaped_part(param, gradients.reduced(begin, end));
}

bool has_grad(ShardedState& state, const ParamIndex& place) {
  state.reducer().settle_earlier();
  const UnitGradients& gradients = *state.reducer().gradients()[place.unit];
  return gradients.is_live(place.slot) || gradients.has_arrived(place.slot);
}

bool has_reduced_grad(ShardedState& state, const ParamIndex& place) {
  state.reducer().settle();
  return state.reducer().gradients()[place.unit]->is_live(place.slot);
}

std::vector<double> ClipCall::numbers() const {
  std::vector<double> numbers = {max_norm, norm_type, epsilon};
  numbers.insert(numbers.end(), counted.begin(), counted.end());
  return numbers;
}

ClipCall ClipCall::from(const std::vector<double>& numbers) {
  return {numbers.at(0), numbers.at(1), numbers.at(2), {numbers.begin() + 3, numbers.end()}};
}

ClipCall clip_call(const ShardedState& state, double max_norm, const ClipOptions& options) {
  TORCH_CHECK_VALUE(max_norm >= 0, "[clip_grad_norm_] max_norm must not be negative; got ",
                    max_norm);
  TORCH_CHECK_VALUE(options.norm_type > 0,
                    "[clip_grad_norm_] norm_type must be positive or infinity; got ",
                    options.norm_type);
  TORCH_CHECK_VALUE(options.epsilon >= 0, "[clip_grad_norm_] epsilon must not be negative; got ",
                    options.epsilon);
  std::set<ParamIndex> excluded;
  for (const std::string& name : options.exclude) {
    const auto place = state.find(name);
    TORCH_CHECK_VALUE(place, "[clip_grad_norm_] options.exclude names '", name,
                      "', which the model does not have");
    excluded.insert(*place);
  }
  ClipCall call{max_norm, options.norm_type, options.epsilon, {}};
  for (size_t unit = 0; unit < state.units().size(); ++unit) {
    for (size_t slot = 0; slot < state.units()[unit]->layout().slots.size(); ++slot)
      call.counted.push_back(excluded.contains({unit, slot}) ? 0 : 1);
  }
  return call;
}

double clip(ShardedState& state, const ClipCall& call) {
  const PhaseScope phase(state.context().progress, Phase::kStep);
  Reducer& reducer = state.reducer();
  std::vector<size_t> begins = {0};  // of the units, in `call.counted`
  for (const auto& unit : state.units())
    begins.push_back(begins.back() + unit->layout().slots.size());
  const auto is_counted = [&](size_t unit, size_t slot) {
    return call.counted[begins[unit] + slot] != 0;
  };
  reducer.settle();
  reducer.record([&] {
    return fmt::format("clipping to norm {} of order {}, epsilon {}, {} parameters", call.max_norm,
                       call.norm_type, call.epsilon,
                       std::count(call.counted.begin(), call.counted.end(), 1.0));
  });
  const double norm = grad_norm(reducer.gradients(), state.mesh(), call.norm_type, is_counted);
  const double factor = call.max_norm / (norm + call.epsilon);
  if (!(factor >= 1)) scale_gradients(reducer.gradients(), factor, is_counted);
  return norm;
}

}  // namespace tessera
