#include "engine/optim/master_digits.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Dict.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>

#include <string>

#include "engine/optim/sharded_optimizer_access.h"

namespace tessera {

// [Note: Digits of master weights]
//
// Master weights have digits that the parameters rounded from them do not show. A run that resumes
// from a state dict needs them, but parameters are loaded separately, before the optimizer's state
// or after it. So the master weights of a state dict change no parameter: where a parameter's
// element has the value that the loaded master rounds to, its master gets the loaded digits back;
// where the element has another value, loaded by the user, that value counts. (For 8-bit values,
// the loaded digits count wherever they are within a step of the quantization.) As parameters may
// be loaded later, the digits are kept and tried again until the next step of the optimizer.
namespace {

// Returns all of a unit's master weights, flat.
at::Tensor whole_master(const Unit& unit) {
  const UnitLayout& layout = unit.layout();
  const at::Tensor own = unit.updated().to(layout.device);
  ProcessGroup& process_group = unit.mesh().shard();
  if (layout.level == ShardLevel::kNone || process_group.size() == 1) return own;
  const at::Tensor whole = at::empty({layout.numel()}, own.options());
  const auto work =
      process_group.all_gather(whole, own, layout.bounds, {layout.name, Channel::kControl});
  work->wait();
  work->wait_inputs();
  return whole;
}

// Returns true where a master weight, taken from a parameter that was loaded, is what `digits`
// round to.
at::Tensor is_rounded(const UnitLayout& layout, const at::Tensor& digits,
                      const at::Tensor& master) {
  // The scale of a block is not known any more: other ranks may have cut it. It is at most that of
  // the largest element, and rounding moves an element by half of it.
  if (layout.quantizes())
    return (digits - master).abs().le(at::maximum(digits.abs().max(), master.abs().max()) / 127);
  const at::ScalarType shown = layout.rounds() ? layout.gather_dtype : layout.dtype;
  return digits.to(shown).eq(master.to(shown));
}

}  // namespace

void add_master_weights(ShardedOptimizer& optimizer, bool receives,
                        OptimizerStateDict& state_dict) {
  const auto state = optimizer.module().state();
  const std::vector<Segment>& segments = OptimizerAccess(optimizer).segments();
  c10::impl::GenericDict masters(c10::StringType::get(), c10::AnyType::get());
  for (const auto& unit : state->units()) {
    if (!unit->layout().has_master()) continue;
    const at::Tensor whole = whole_master(*unit);
    for (size_t number = 0; receives && number < segments.size(); ++number) {
      if (segments[number].place.unit != static_cast<size_t>(unit->index())) continue;
      const at::Tensor param = view_param(state->slot(segments[number].place), whole);
      masters.insert(std::to_string(number), param.to(at::kCPU, param.scalar_type(),
                                                      /*non_blocking=*/false, /*copy=*/true));
    }
  }
  if (!masters.empty()) state_dict.extra[kMasterWeights] = masters;
}

std::vector<at::Tensor> cut_master_weights(ShardedOptimizer& optimizer,
                                           const OptimizerStateDict& state_dict,
                                           const std::vector<int64_t>& numbers) {
  const auto it = state_dict.extra.find(kMasterWeights);
  if (it == state_dict.extra.end()) return {};
  TORCH_CHECK_VALUE(it->second.isGenericDict(), "[load_full_state_dict] '", kMasterWeights,
                    "' must be a dict of tensors by parameter number; got ", it->second.tagKind());
  const auto masters = it->second.toGenericDict();
  const ShardedState& state = *optimizer.module().state();
  const std::vector<Segment>& segments = OptimizerAccess(optimizer).segments();
  std::vector<at::Tensor> parts(segments.size());
  for (size_t i = 0; i < segments.size(); ++i) {
    const auto master = masters.find(std::to_string(numbers[i]));
    const ParamSlot& slot = state.slot(segments[i].place);
    const Unit& unit = *state.units()[segments[i].place.unit];
    if (master == masters.end() || !unit.layout().has_master()) continue;
    const bool fits = master->value().isTensor() &&
                      master->value().toTensor().sizes() == at::IntArrayRef(slot.sizes);
    TORCH_CHECK_VALUE(
        fits, "[load_full_state_dict] master weights must have their parameter's shape; expected ",
        at::IntArrayRef(slot.sizes), " for '", slot.name(), "', got ",
        master->value().isTensor() ? c10::str(master->value().toTensor().sizes())
                                   : master->value().tagKind());
    const at::Tensor& tensor = segments[i].tensor;
    if (!tensor.defined()) continue;
    parts[i] = cut_segment(slot, segments[i], master->value().toTensor()).to(tensor.options());
  }
  return parts;
}

void restore_digits(const ShardedState& state, const std::vector<Segment>& segments) {
  for (const Segment& segment : segments) {
    if (!segment.digits.defined()) continue;
    const UnitLayout& layout = state.units()[segment.place.unit]->layout();
    const at::Tensor& master = segment.tensor;
    if (master.numel() == 0) continue;
    master.copy_(at::where(is_rounded(layout, segment.digits, master), segment.digits, master));
  }
}

}  // namespace tessera
