#include "checkpoint/chunks.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/optim/optimizer.h>

#include <iterator>
#include <utility>

#include "base/dispatch/math_bits.h"
#include "checkpoint/safetensors.h"
#include "engine/optim/param_state.h"
#include "engine/optim/state_shape.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

constexpr const char* kShapeError =
    "[save_checkpoint] the optimizer's state must have its parameter's shape ";

// Returns the state of a parameter as a 1-D tensor, in the parameter's memory order.
at::Tensor flat_state(const std::string& name, const at::Tensor& value, const at::Tensor& param) {
  TORCH_CHECK(value.sizes() == at::IntArrayRef(state_sizes(name, param.sizes())), kShapeError,
              param.sizes(), "; got ", value.sizes());
  return is_scale(name) ? value : flat_in_order(value, param.strides());
}

}  // namespace

ChunkData chunk_of(std::string key, const at::Tensor& data) {
  return {std::move(key), data.scalar_type(), data.numel(),
          [data] { return with_plain_memory(data); }};
}

ChunkCollector::ChunkCollector(int rank, int size) : rank_(rank) {
  contents_.index.world_size = size;
}

void ChunkCollector::add_model(const ModelView& view) {
  for (const ParamView& param : view.params) add_part(record_of(param), param, param.values);
  // Buffers that ranks don't synchronize differ: store rank 0's of all, so that they fit together.
  for (const NamedTensor& buffer : view.buffers)
    add_shared(record_of(buffer), buffer.tensor, {.index = rank_, .count = 1});
}

void ChunkCollector::add_masters(const ModelView& view) {
  for (const ParamView& param : view.params) {
    if (param.dtype != param.master_dtype || param.is_rounded)
      add_part(record_of(param, "master"), param, param.values);
  }
}

void ChunkCollector::add_optimizer(const ModelView& view) {
  OptimizerRecord& record = contents_.index.optimizer.emplace();
  record.kind = optimizer_kind(*view.optimizer);
  for (size_t group = 0; group < view.optimizer->param_groups().size(); ++group)
    record.param_groups.push_back({.options = read_options(*view.optimizer, group)});
  for (const OptimizedParam& optimized : view.optimized) {
    const ParamView& param = view.params[optimized.param];
    record.param_groups[optimized.param_group].params.push_back(param.name());
    if (optimized.tensor.defined()) add_states(view, param, optimized.tensor);
  }
}

void ChunkCollector::add_tensors(const std::map<std::string, at::Tensor>& tensors) {
  for (const auto& [name, tensor] : tensors)
    add_shared(contiguous_record("tensor", {name}, tensor.sizes().vec(), tensor.scalar_type()),
               tensor, {rank_, contents_.index.world_size});
}

void ChunkCollector::add_rank_state(const std::string& group,
                                    const std::map<std::string, at::Tensor>& tensors) {
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK_VALUE(tensor.defined() && !is_dist(tensor), "[save_checkpoint] '", name,
                      "' of rank_state must be an ordinary tensor");
    TensorRecord record =
        contiguous_record("rank", {group + "/" + name}, tensor.sizes().vec(), tensor.scalar_type());
    record.state = std::to_string(rank_);
    if (tensor.numel() > 0) {
      record.chunks.push_back(
          {rank_file(rank_, contents_.index.world_size), record.id(), Region{0, tensor.numel()}});
      contents_.chunks.push_back(chunk_of(record.id(), tensor.detach().reshape({-1})));
    }
    contents_.index.tensors.push_back(std::move(record));
  }
}

void ChunkCollector::add_stored(std::vector<TensorRecord> records) {
  auto& tensors = contents_.index.tensors;
  tensors.insert(tensors.begin(), std::make_move_iterator(records.begin()),
                 std::make_move_iterator(records.end()));
}

// `data`: the values of `region`. Rank 0 alone lists records without data.
void ChunkCollector::add(TensorRecord record, const Region& region, const at::Tensor& data) {
  const bool has_data = region.numel() > 0;
  if (!has_data && rank_ != 0) return;
  if (has_data) {
    std::string key = record.id();
    if (region.box) key += fmt::format("/{}", fmt::join(region.box->offset, ","));
    key += fmt::format("/{}", region.begin);
    record.chunks.push_back({rank_file(rank_, contents_.index.world_size), key, region});
    contents_.chunks.push_back(chunk_of(std::move(key), data));
  }
  contents_.index.tensors.push_back(std::move(record));
}

// Adds those of `values`, this rank's elements of the parameter, that this rank stores.
void ChunkCollector::add_part(TensorRecord record, const ParamView& param,
                              const at::Tensor& values) {
  const Region stored = param.stored();
  at::Tensor data;
  if (stored.numel() > 0)
    data = values.reshape({-1}).narrow(0, stored.begin - param.begin, stored.numel());
  add(std::move(record), stored, data);
}

// Adds this rank's part of a tensor that several ranks have, if it is this rank's turn to store it.
// `replica`: this rank among those with equal values; a DistTensor's own replaces it.
void ChunkCollector::add_shared(TensorRecord record, const at::Tensor& tensor, Replica replica) {
  Region region{0, tensor.numel()};
  if (const DistMeta* meta = find_dist_meta(tensor)) {
    region = part_of(*meta->spec, tensor.sizes(), record.names.front());
    replica = replica_of(*meta->spec);
  }
  const auto nbytes = static_cast<int64_t>(tensor.numel() * tensor.element_size());
  if (turns_.next(replica.count, nbytes) != replica.index) region = {};
  at::Tensor data;
  if (region.numel() > 0) data = local_of(tensor).detach().reshape({-1});
  add(std::move(record), region, data);
}

void ChunkCollector::add_states(const ModelView& view, const ParamView& param,
                                const at::Tensor& tensor) {
  const ParamState states = read_param_state(*view.optimizer, tensor);
  const OtherShapes others = other_shapes(*view.optimizer);
  if (!states.counts.empty()) contents_.index.optimizer->counts[param.name()] = states.counts;
  for (const auto& [name, value] : states.tensors) {
    const ParamView own = is_scale(name) ? view_of_scales(param) : param;
    TensorRecord record = record_of(own, "state");
    record.state = name;
    record.dtype = safetensors_dtype(value.scalar_type());
    TORCH_CHECK(!is_dist(value) || value.sizes() == tensor.sizes(), kShapeError, tensor.sizes(),
                "; got ", value.sizes());
    if (!is_dist(value) && tensor.numel() == param.numel() && others.contains(name)) {
      // Read back in the same order of memory, on which bits of a product depend.
      const at::Tensor dense = value.is_non_overlapping_and_dense() ? value : value.contiguous();
      record.shape = dense.sizes().vec();
      record.strides = dense.strides().vec();
      const bool is_stored = param.stored_begin < param.stored_end;
      add(std::move(record), {0, is_stored ? dense.numel() : 0},
          flat_in_order(dense, dense.strides()));
      continue;
    }
    is_dist(value) ? add_shared(std::move(record), value, {})
                   : add_part(std::move(record), own, flat_state(name, value, tensor));
  }
}

}  // namespace tessera
