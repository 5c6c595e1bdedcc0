#include "engine/optim/kept_units.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <torch/optim/optimizer.h>

#include "engine/optim/param_state.h"

namespace tessera {
namespace {

using UnitSegments = std::vector<const Segment*>;

std::vector<UnitSegments> by_unit(const ShardedState& state, const std::vector<Segment>& segments) {
  std::vector<UnitSegments> units(state.units().size());
  for (const Segment& segment : segments) {
    if (segment.tensor.defined()) units[segment.place.unit].push_back(&segment);
  }
  return units;
}

// Returns true if this optimizer updates this rank's whole part of the unit: another optimizer's
// tensors would still refer to the old memory.
bool is_all_of(const Unit& unit, const UnitSegments& segments) {
  size_t mine = 0;
  for (const ParamSlot& slot : unit.layout().slots) {
    const auto [begin, end] = unit.updated_range(slot);
    if (begin < end) ++mine;
  }
  return mine == segments.size();
}

// Returns the bytes that the optimizer keeps for a segment, including state that its first steps
// will make.
int64_t state_nbytes_of(torch::optim::Optimizer& optimizer, const Segment& segment) {
  const ParamState state = read_param_state(optimizer, segment.tensor);
  int64_t nbytes = state.nbytes();
  for (const StateTensor& tensor :
       state_tensors(optimizer, optimizer.param_groups()[segment.param_group],
                     segment.tensor.scalar_type(), segment.tensor.sizes())) {
    if (!state.tensors.contains(tensor.name)) nbytes += tensor.nbytes();
  }
  return nbytes;
}

// Turns the optimizer's tensors that are views of `old` into views of the tensor that the unit
// updates now. This includes the placeholders of parameters on other ranks, as they keep the memory
// alive, too.
void point_to_updated(torch::optim::Optimizer& optimizer, const Unit& unit, const at::Tensor& old) {
  for (auto& param_group : optimizer.param_groups()) {
    for (at::Tensor& param : param_group.params()) {
      if (!param.is_alias_of(old)) continue;
      const int64_t offset =
          param.storage_offset() - old.storage_offset() + unit.updated().storage_offset();
      param.set_data(at::as_strided(unit.updated(), param.sizes(), param.strides(), offset));
    }
  }
}

void bring_unit_back(Unit& unit, torch::optim::Optimizer& optimizer, const UnitSegments& segments) {
  for (const Segment* segment : segments) {
    replace_state_tensors(optimizer, segment->tensor, [&](const at::Tensor& tensor) {
      return at::empty_strided(tensor.sizes(), tensor.strides(),
                               tensor.options().device(unit.layout().device))
          .copy_(tensor);
    });
  }
  const at::Tensor old = unit.updated();
  unit.bring_back();
  point_to_updated(optimizer, unit, old);
}

}  // namespace

int64_t bring_units_back(ShardedState& state, torch::optim::Optimizer& optimizer,
                         const std::vector<Segment>& segments, int64_t nbytes) {
  at::NoGradGuard no_grad;
  const auto units = by_unit(state, segments);
  int64_t taken = 0;
  for (const auto& unit : state.units()) {
    const UnitSegments& own = units[unit->index()];
    if (!unit->master().is_offloaded() || !is_all_of(*unit, own)) continue;
    auto wanted = static_cast<int64_t>(unit->master().values().nbytes());
    for (const Segment* segment : own) wanted += state_nbytes_of(optimizer, *segment);
    if (taken + wanted > nbytes) continue;
    bring_unit_back(*unit, optimizer, own);
    taken += wanted;
  }
  return taken;
}

int64_t kept_state_nbytes(const ShardedState& state, const torch::optim::Optimizer& optimizer,
                          const std::vector<Segment>& segments) {
  int64_t nbytes = 0;
  for (const Segment& segment : segments) {
    if (segment.tensor.defined() && !state.units()[segment.place.unit]->master().is_offloaded())
      nbytes += read_param_state(optimizer, segment.tensor).nbytes();
  }
  return nbytes;
}

}  // namespace tessera
