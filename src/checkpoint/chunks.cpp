#include "checkpoint/chunks.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <utility>

#include "checkpoint/optimizer_options.h"
#include "checkpoint/safetensors.h"
#include "optim/param_state.h"
#include "optim/sharded_optimizer_access.h"

namespace tessera {
namespace {

TensorRecord record_of(const ParamSlot& slot) {
  TensorRecord record{
      .kind = "param", .names = slot.names, .shape = slot.sizes, .strides = slot.strides};
  record.dtype = safetensors_dtype(slot.dtype);
  return record;
}

TensorRecord record_of(const NamedTensor& buffer) {
  TensorRecord record{
      .kind = "buffer", .names = {buffer.name}, .shape = buffer.tensor.sizes().vec()};
  const auto strides = c10::contiguous_strides(record.shape);
  record.strides.assign(strides.begin(), strides.end());
  record.dtype = safetensors_dtype(buffer.tensor.scalar_type());
  return record;
}

// The state of a segment in the segment's memory order, 1-D.
at::Tensor flat_state(const at::Tensor& value, const Segment& segment) {
  const at::Tensor& like = segment.tensor;
  TORCH_CHECK(value.sizes() == like.sizes(),
              "[save_checkpoint] the optimizer's state must have its parameter's shape ",
              like.sizes(), "; got ", value.sizes());
  at::Tensor ordered = value;
  if (value.strides() != like.strides()) {
    ordered = at::empty_strided(like.sizes(), like.strides(), value.options());
    ordered.copy_(value);
  }
  return at::as_strided(ordered, {like.numel()}, {1}, ordered.storage_offset());
}

class Collector {
 public:
  Collector(const ShardedState& state, const ShardedOptimizer* optimizer)
      : state_(state), optimizer_(optimizer), rank_(state.process_group().rank()) {
    contents_.index.world_size = state.process_group().size();
  }

  RankContents collect() && {
    for (const auto& unit : state_.units()) {
      for (const ParamSlot& slot : unit->layout().slots) add_param(*unit, slot);
    }
    if (rank_ == 0) {
      for (const NamedTensor& buffer : state_.buffers()) add_buffer(buffer);
    }
    if (optimizer_) add_optimizer();
    return std::move(contents_);
  }

 private:
  // This rank's elements of a parameter, in the unit's flat buffer. They are those of its shard
  // even if every rank has and updates all.
  std::pair<int64_t, int64_t> range_of(const Unit& unit, const ParamSlot& slot) const {
    const auto& bounds = unit.layout().bounds;
    return {std::max(slot.offset, bounds[rank_]),
            std::min(slot.offset + slot.numel, bounds[rank_ + 1])};
  }

  // `data` holds elements [begin, end) of the tensor; records without data are rank 0's to list.
  void add(TensorRecord record, int64_t begin, int64_t end, const at::Tensor& data) {
    const bool has_data = begin < end;
    if (!has_data && rank_ != 0) return;
    if (has_data) {
      const std::string key = fmt::format("{}/{}", record.id(), begin);
      record.chunks.push_back({rank_file(rank_, contents_.index.world_size), key, begin, end});
      contents_.chunks.push_back({key, data});
    }
    contents_.index.tensors.push_back(std::move(record));
  }

  void add_param(const Unit& unit, const ParamSlot& slot) {
    const auto [begin, end] = range_of(unit, slot);
    at::Tensor data;
    if (begin < end) data = unit.updated().narrow(0, begin - unit.updated_begin(), end - begin);
    add(record_of(slot), begin - slot.offset, end - slot.offset, data);
  }

  void add_buffer(const NamedTensor& buffer) {
    if (!buffer.tensor.defined()) return;
    const int64_t numel = buffer.tensor.numel();
    add(record_of(buffer), 0, numel, buffer.tensor.contiguous().view({numel}));
  }

  void add_optimizer() {
    torch::optim::Optimizer& optimizer = optimizer_->inner();
    OptimizerRecord& record = contents_.index.optimizer.emplace();
    record.kind = optimizer_kind(optimizer);
    for (auto& group : optimizer.param_groups()) {
      record.param_groups.push_back({.options = read_options(record.kind, group)});
    }
    for (const Segment& segment : segments_of(*optimizer_)) {
      const std::string& name = state_.slot(segment.place).name();
      record.param_groups[segment.param_group].params.push_back(name);
      if (segment.tensor.defined()) add_state(segment, name);
    }
  }

  void add_state(const Segment& segment, const std::string& name) {
    const ParamSlot& slot = state_.slot(segment.place);
    const auto [begin, end] = range_of(*state_.units()[segment.place.unit], slot);
    const ParamState param_state = read_param_state(optimizer_->inner(), segment.tensor);
    if (!param_state.counts.empty()) contents_.index.optimizer->counts[name] = param_state.counts;
    for (const auto& [state_name, value] : param_state.tensors) {
      if (begin >= end) continue;
      TensorRecord record = record_of(slot);
      record.kind = "state";
      record.state = state_name;
      record.dtype = safetensors_dtype(value.scalar_type());
      const at::Tensor data =
          flat_state(value, segment).narrow(0, begin - segment.begin, end - begin);
      add(std::move(record), begin - slot.offset, end - slot.offset, data);
    }
  }

  const ShardedState& state_;
  const ShardedOptimizer* optimizer_;
  int rank_;
  RankContents contents_;
};

}  // namespace

RankContents contents_of_rank(const ShardedState& state, const ShardedOptimizer* optimizer) {
  return Collector(state, optimizer).collect();
}

bool is_same_order(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != 1 && a[dim] != b[dim]) return false;
  }
  return true;
}

}  // namespace tessera
