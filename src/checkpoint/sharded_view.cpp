#include <c10/util/Exception.h>

#include <tuple>
#include <utility>

#include "checkpoint/dist_part.h"
#include "checkpoint/model_view.h"
#include "mesh/shard_mesh.h"
#include "optim/sharded_optimizer_access.h"

namespace tessera {
namespace {

// Returns the elements of a parameter that lie in [from, to) of the unit's flat buffer.
std::pair<int64_t, int64_t> part_of(const ParamSlot& slot, int64_t from, int64_t to) {
  const auto [begin, end] = overlap(slot, from, to);
  return {begin - slot.offset, end - slot.offset};
}

// For a DistTensor: sets where this rank's part lies in it.
void set_box(ParamView& param, const ParamSlot& slot) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      slot.strides == row_major(slot.sizes), "[checkpoint] '", slot.name(),
      "' is a DistTensor whose part is not contiguous; make it so before fully_shard()");
  const Region part = part_of(*slot.dist->spec, slot.dist->sizes, slot.name());
  param.box = part.box;
}

ParamView view_of_param(const Unit& unit, const ParamSlot& slot) {
  ParamView param{.names = slot.names,
                  .sizes = slot.global_sizes(),
                  .strides = slot.dist ? row_major(slot.dist->sizes) : slot.strides,
                  .dtype = slot.dtype,
                  .master_dtype = slot.master_dtype};
  if (slot.dist) set_box(param, slot);
  std::tie(param.begin, param.end) = part_of(slot, unit.updated_begin(), unit.updated_end());
  if (param.begin < param.end) {
    param.values = unit.updated().narrow(0, slot.offset + param.begin - unit.updated_begin(),
                                         param.end - param.begin);
  }
  // A rank stores its shard, even if every rank has and updates all elements. Replicas take turns.
  const ShardMesh& mesh = unit.context().mesh;
  if (unit.index() % mesh.replicate().size() != mesh.replicate().rank()) return param;
  if (!(slot.dist ? slot.dist->is_first_replica : mesh.parts().rank() == 0)) return param;
  const auto* bounds = &unit.layout().bounds[mesh.shard().rank()];
  std::tie(param.stored_begin, param.stored_end) = part_of(slot, bounds[0], bounds[1]);
  return param;
}

}  // namespace

std::vector<ParamSlot> ignored_slots(const ShardedState& state) {
  if (state.ignored_parameters().empty()) return {};
  return collect_parameters(state.ignored_parameters().vec());
}

ModelView view_of(const ShardedState& state, const ShardedOptimizer* optimizer) {
  state.check_replicated("checkpoint");
  if (optimizer) segments_of(*optimizer);  // adopts new parameters, before values are read
  ModelView view;
  std::vector<size_t> first_param;  // of each unit
  for (const auto& unit : state.units()) {
    unit->views().check();
    first_param.push_back(view.params.size());
    for (const ParamSlot& slot : unit->layout().slots)
      view.params.push_back(view_of_param(*unit, slot));
  }
  ReplicaTurns turns;
  for (const ParamSlot& slot : ignored_slots(state)) {
    view.params.push_back(view_of_whole(slot, Ranks::of(state.mesh()).rank(), /*ranks=*/1, turns));
    view.params.back().is_rank_own = !slot.dist;
  }
  for (const NamedTensor& buffer : state.module_buffers()) {
    if (buffer.tensor.defined()) view.buffers.push_back(buffer);
  }
  if (!optimizer) return view;
  TORCH_CHECK_VALUE(
      optimizer->module().state().get() == &state,
      "[checkpoint] the optimizer must be that of the module; it was made for another one");
  view.optimizer = &optimizer->inner();
  for (const Segment& segment : segments_of(*optimizer)) {
    view.optimized.push_back({first_param[segment.place.unit] + segment.place.slot,
                              segment.param_group, segment.tensor});
  }
  return view;
}

}  // namespace tessera
