#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <set>
#include <utility>

#include "checkpoint/dist_part.h"
#include "checkpoint/model_view.h"
#include "grad/grad_gate.h"
#include "optim/optimizer_parameters.h"
#include "unit/unit_storage.h"

namespace tessera {
namespace {

// The index of each parameter by its tensor; tied ones share it.
using IndexByTensor = std::map<const c10::TensorImpl*, size_t>;

std::vector<NamedTensor> named_parameters(const torch::nn::Module& module) {
  std::vector<NamedTensor> params;
  for (const auto& item : module.named_parameters()) {
    TORCH_CHECK_VALUE(!item.value().is_meta(), "[checkpoint] parameter '", item.key(),
                      "' has no data (device meta): give it memory before it is loaded");
    TORCH_CHECK_VALUE(unit_of(item.value()) == nullptr && !has_grad_gate(item.value()), "[checkpoint] parameter '", item.key(),
                      "' is sharded; expected a plain module, or what fully_shard() returned");
    params.push_back({item.key(), item.value()});
  }
  return params;
}

std::vector<OptimizedParam> view_of_optimizer(const torch::optim::Optimizer& optimizer,
                                              const IndexByTensor& places) {
  std::vector<OptimizedParam> optimized;
  std::set<size_t> seen;  // tied parameters may be listed more than once
  const auto& groups = optimizer.param_groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    for (const at::Tensor& tensor : groups[group].params()) {
      const size_t place = places.at(tensor.unsafeGetTensorImpl());
      if (seen.insert(place).second) optimized.push_back({place, group, tensor});
    }
  }
  return optimized;
}

}  // namespace

ParamView view_of_whole(const ParamSlot& slot, int rank, int ranks, ReplicaTurns& turns) {
  ParamView param{.names = slot.names,
                  .sizes = slot.global_sizes(),
                  .strides = slot.dist ? row_major(slot.dist->sizes) : slot.strides,
                  .dtype = slot.dtype,
                  .master_dtype = slot.dtype};
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
  const at::Tensor value = slot.local().detach();
  // A tensor with gaps in its memory is seen in its logical order, as are its elements then.
  param.values = (slot.dist ? value.is_contiguous() : value.is_non_overlapping_and_dense())
                     ? at::as_strided(value, {slot.numel}, {1}, value.storage_offset())
                     : value;
  return param;
}

ModelView view_of(torch::nn::Module& module, torch::optim::Optimizer* optimizer, int rank,
                  int ranks) {
  ModelView view{.optimizer = optimizer};
  IndexByTensor places;
  std::vector<NamedTensor> handles;  // of the parameters
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
  if (optimizer) {
    check_optimized_once("checkpoint", handles, {optimizer});
    view.optimized = view_of_optimizer(*optimizer, places);
  }
  return view;
}

}  // namespace tessera
