#include "checkpoint/model_view.h"

#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoint/safetensors.h"
#include "engine/grad/grad_gate.h"
#include "engine/optim/averaged_weights.h"
#include "engine/optim/optimizer_parameters.h"
#include "engine/optim/sharded_optimizer_access.h"
#include "engine/optim/small_state.h"
#include "engine/unit/unit_storage.h"
#include "tensor/chunks.h"
#include "tensor/shard_mesh.h"

namespace tessera {
namespace {

// Returns a shape in which a dim that is first cut into blocks is two dims: blocks, and rows of a
// block. `dims`: the index in it of each dim of the tensor; for two dims, that of the rows.
std::vector<int64_t> shape_of_blocks(const DistSpec& spec, at::IntArrayRef sizes,
                                     std::vector<int64_t>& dims) {
  std::vector<int64_t> factors(sizes.size(), 1), shape;
  for (const Placement& placement : spec.placements) {
    if (is_split(placement))
      factors[std::get<Shard>(placement).dim] = std::get<Shard>(placement).split_factor;
  }
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (factors[dim] > 1) shape.push_back(factors[dim]);
    dims.push_back(static_cast<int64_t>(shape.size()));
    shape.push_back(sizes[dim] / factors[dim]);
  }
  return shape;
}

ParamView view_without_part(const ParamSlot& slot) {
  return {.names = slot.names,
          .sizes = slot.global_sizes(),
          .strides = slot.dist ? row_major(slot.dist->sizes) : slot.strides,
          .dtype = slot.dtype,
          .master_dtype = slot.dtype};
}

// Views a parameter that this process has whole, or as a DistTensor. `turns` chooses which of
// `ranks` equal ranks stores it.
ParamView view_of_whole(const ParamSlot& slot, int rank, int ranks, ReplicaTurns& turns) {
  ParamView param = view_without_part(slot);
  const int64_t nbytes =
      c10::multiply_integers(param.sizes) * static_cast<int64_t>(c10::elementSize(slot.dtype));
  Replica replica{rank, ranks};
  if (slot.dist) {
    const DistSpec& spec = *slot.dist->spec;
    replica = replica_of(spec);
    Region part = part_of(spec, param.sizes, slot.name());
    param.end = part.end;
    param.box = std::move(part.box);
  } else {
    param.end = slot.numel;
  }
  if (turns.next(replica.count, nbytes) == replica.index) param.stored_end = param.end;
  for (size_t i = 0; i < slot.handles.size(); ++i) param.tensors.push_back(slot.tensor(i));
  const at::Tensor value = slot.local().detach();
  // A tensor with gaps in its memory is seen in its logical order, as are its elements then.
  param.values = (slot.dist ? value.is_contiguous() : value.is_non_overlapping_and_dense())
                     ? at::as_strided(value, {slot.numel}, {1}, value.storage_offset())
                     : value;
  return param;
}

std::vector<NamedTensor> named_parameters(const torch::nn::Module& module) {
  std::vector<NamedTensor> params;
  for (const auto& item : module.named_parameters()) {
    TORCH_CHECK_VALUE(!item.value().is_meta(), "[checkpoint] parameter '", item.key(),
                      "' has no data (device meta): give it memory before it is loaded");
    TORCH_CHECK_VALUE(
        unit_of(item.value()) == nullptr && !has_grad_gate(item.value()),
        "[checkpoint] parameter '", item.key(),
        "' is sharded; expected a plain module, or the handle that fully_shard() returned");
    params.push_back({item.key(), item.value()});
  }
  return params;
}

// Returns the elements of a parameter that lie in [from, to) of the unit's flat buffer.
std::pair<int64_t, int64_t> part_of(const ParamSlot& slot, int64_t from, int64_t to) {
  const auto [begin, end] = overlap(slot, from, to);
  return {begin - slot.offset, end - slot.offset};
}

ParamView view_of_param(const Unit& unit, const ParamSlot& slot) {
  ParamView param = view_without_part(slot);
  param.master_dtype = slot.master_dtype;
  param.is_rounded = unit.layout().rounds();
  if (slot.dist) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        slot.strides == row_major(slot.sizes), "[checkpoint] '", slot.name(),
        "' is a DistTensor whose part is not contiguous; make it so before fully_shard()");
    param.box = part_of(*slot.dist->spec, slot.dist->sizes, slot.name()).box;
  }
  std::tie(param.begin, param.end) = part_of(slot, unit.updated_begin(), unit.updated_end());
  if (param.begin < param.end) {
    param.values = unit.updated().narrow(0, slot.offset + param.begin - unit.updated_begin(),
                                         param.end - param.begin);
  }
  // A rank stores its shard, even if every rank has and updates all elements. Replicas take turns.
  const ShardMesh& mesh = unit.mesh();
  if (unit.index() % mesh.replicate().size() != mesh.replicate().rank()) return param;
  if (!(slot.dist ? slot.dist->is_first_replica : mesh.parts().rank() == 0)) return param;
  const auto* bounds = &unit.layout().bounds[mesh.shard().rank()];
  std::tie(param.stored_begin, param.stored_end) = part_of(slot, bounds[0], bounds[1]);
  return param;
}

}  // namespace

Region part_of(const DistSpec& spec, at::IntArrayRef sizes, const std::string& name) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      std::none_of(spec.placements.begin(), spec.placements.end(), is_partial), "[checkpoint] '",
      name, "' is ", to_string(spec.placements),
      ": each rank has a term of its values. redistribute() it to Replicate or Shard first");
  if (!spec.mesh.is_member()) return {};
  if (std::all_of(spec.placements.begin(), spec.placements.end(), is_replicate))
    return {0, c10::multiply_integers(sizes)};
  std::vector<int64_t> dims;
  Box box{.shape = shape_of_blocks(spec, sizes, dims), .offset = {}, .sizes = {}};
  Placements placements = without_splits(spec.placements);
  for (Placement& placement : placements) {
    if (auto* shard = std::get_if<Shard>(&placement)) shard->dim = dims[shard->dim];
  }
  for (const Range& range :
       local_box(box.shape, placements, spec.mesh.shape(), *spec.mesh.coordinate())) {
    box.offset.push_back(range.begin);
    box.sizes.push_back(range.size());
  }
  const int64_t numel = box.numel();
  return numel == 0 ? Region{} : Region{0, numel, std::move(box)};
}

ParamView view_of_scales(const ParamView& param) {
  ParamView scales{.names = param.names, .sizes = {}, .strides = {1}};
  scales.sizes = {blocks_of(c10::multiply_integers(param.sizes))};
  scales.begin = blocks_of(param.begin), scales.end = blocks_of(param.end);
  scales.stored_begin = blocks_of(param.stored_begin);
  scales.stored_end = blocks_of(param.stored_end);
  return scales;
}

int64_t ReplicaTurns::next(int64_t replicas, int64_t nbytes) {
  LeastLoaded& ranks = stored_.try_emplace(replicas, static_cast<int>(replicas)).first->second;
  const int rank = ranks.next();
  ranks.add(rank, nbytes);
  return rank;
}

Replica replica_of(const DistSpec& spec) {
  Replica replica;
  for (int64_t dim = 0; dim < spec.mesh.ndim(); ++dim) {
    if (!is_replicate(spec.placements[dim])) continue;
    replica.count *= spec.mesh.size(dim);
    replica.index = replica.index * spec.mesh.size(dim) +
                    (spec.mesh.is_member() ? (*spec.mesh.coordinate())[dim] : 0);
  }
  return replica;
}

std::vector<ParamSlot> ignored_slots(const ShardedState& state) {
  if (state.buffers().ignored().empty()) return {};
  return collect_parameters(state.buffers().ignored().vec());
}

ModelView view_of(const ShardedState& state, const ShardedOptimizer* optimizer) {
  state.check_replicated("checkpoint");
  if (optimizer)
    OptimizerAccess(*optimizer).segments();  // adopts new parameters, before values are read
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
  for (const NamedTensor& buffer : state.buffers().saved()) {
    if (buffer.tensor.defined()) view.buffers.push_back(buffer);
  }
  for (const NamedTensor& buffer : state.buffers().left_out()) view.left_out.insert(buffer.name);
  if (!optimizer) return view;
  TORCH_CHECK_VALUE(
      optimizer->module().state().get() == &state,
      "[checkpoint] the optimizer must be that of the module; it was made for another one");
  view.optimizer = &optimizer->inner();
  for (const Segment& segment : OptimizerAccess(*optimizer).segments()) {
    view.optimized.push_back({first_param[segment.place.unit] + segment.place.slot,
                              segment.param_group, segment.tensor});
  }
  return view;
}

ModelView view_of(const AveragedWeights& average) {
  ModelView view = view_of(*average.state, nullptr);
  size_t place = 0;  // units come first
  for (const auto& unit : average.state->units()) {
    const at::Tensor values = average.value(*unit);
    for (const ParamSlot& slot : unit->layout().slots) {
      ParamView& param = view.params[place++];
      param.master_dtype = values.scalar_type();
      if (param.begin == param.end) continue;
      param.values = values.narrow(0, slot.offset + param.begin - unit->updated_begin(),
                                   param.end - param.begin);
    }
  }
  return view;
}

ModelView view_of(torch::nn::Module& module, torch::optim::Optimizer* optimizer, int rank,
                  int ranks) {
  ModelView view{.optimizer = optimizer};
  std::map<const c10::TensorImpl*, size_t> places;  // tied parameters share one
  std::vector<NamedTensor> handles;                 // of the parameters
  ReplicaTurns turns;
  const std::vector<NamedTensor> params = named_parameters(module);
  if (!params.empty()) {
    for (const ParamSlot& slot : collect_parameters(params)) {
      for (size_t i = 0; i < slot.handles.size(); ++i) {
        handles.push_back({slot.name(), slot.tensor(i)});
        places[handles.back().tensor.unsafeGetTensorImpl()] = view.params.size();
      }
      view.params.push_back(view_of_whole(slot, rank, ranks, turns));
    }
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) view.buffers.push_back({item.key(), item.value()});
  }
  if (!optimizer) return view;
  check_optimized_once("checkpoint", handles, {optimizer});
  std::set<size_t> seen;  // tied parameters may be listed more than once
  for (size_t group = 0; group < optimizer->param_groups().size(); ++group) {
    for (const at::Tensor& tensor : optimizer->param_groups()[group].params()) {
      const size_t place = places.at(tensor.unsafeGetTensorImpl());
      if (seen.insert(place).second) view.optimized.push_back({place, group, tensor});
    }
  }
  return view;
}

TensorRecord record_of(const ParamView& param, std::string kind) {
  TensorRecord record{.kind = std::move(kind),
                      .names = param.names,
                      .shape = param.sizes,
                      .strides = param.strides};
  record.dtype = safetensors_dtype(param.master_dtype);
  return record;
}

TensorRecord record_of(const NamedTensor& buffer) {
  return contiguous_record("buffer", {buffer.name}, buffer.tensor.sizes().vec(),
                           buffer.tensor.scalar_type());
}

}  // namespace tessera
