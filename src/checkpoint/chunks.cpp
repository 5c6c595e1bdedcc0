#include "checkpoint/chunks.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <utility>

#include "checkpoint/optimizer_options.h"
#include "checkpoint/safetensors.h"
#include "optim/param_state.h"

namespace tessera {
namespace {

// The state of a parameter in the parameter's memory order, 1-D.
at::Tensor flat_state(const at::Tensor& value, const at::Tensor& param) {
  TORCH_CHECK(value.sizes() == param.sizes(),
              "[save_checkpoint] the optimizer's state must have its parameter's shape ",
              param.sizes(), "; got ", value.sizes());
  return flat_in_order(value, param.strides());
}

class Collector {
 public:
  Collector(const ModelView& view, int rank, int size) : view_(view), rank_(rank) {
    contents_.index.world_size = size;
  }

  void add_model() {
    for (const ParamView& param : view_.params) add_part(record_of(param), param, param.values);
    if (rank_ != 0) return;
    for (const NamedTensor& buffer : view_.buffers) {
      const int64_t numel = buffer.tensor.numel();
      add(record_of(buffer), 0, numel, buffer.tensor.contiguous().view({numel}));
    }
  }

  // What parameters that are stored in the dtype of their use don't tell.
  void add_masters() {
    for (const ParamView& param : view_.params) {
      if (param.dtype == param.master_dtype) continue;
      TensorRecord record = record_of(param);
      record.kind = "master";
      add_part(std::move(record), param, param.values);
    }
  }

  void add_optimizer() {
    OptimizerRecord& record = contents_.index.optimizer.emplace();
    record.kind = optimizer_kind(*view_.optimizer);
    for (auto& group : view_.optimizer->param_groups()) {
      record.param_groups.push_back({.options = read_options(record.kind, group)});
    }
    for (const OptimizedParam& optimized : view_.optimized) {
      const ParamView& param = view_.params[optimized.param];
      record.param_groups[optimized.param_group].params.push_back(param.name());
      if (optimized.tensor.defined()) add_states(param, optimized.tensor);
    }
  }

  RankContents take() && { return std::move(contents_); }

 private:
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

  // Of `values`, which this rank has, those that it stores.
  void add_part(TensorRecord record, const ParamView& param, const at::Tensor& values) {
    const int64_t begin = param.stored_begin, end = param.stored_end;
    at::Tensor data;
    if (begin < end) data = values.narrow(0, begin - param.begin, end - begin);
    add(std::move(record), begin, end, data);
  }

  void add_states(const ParamView& param, const at::Tensor& tensor) {
    const ParamState states = read_param_state(*view_.optimizer, tensor);
    if (!states.counts.empty()) contents_.index.optimizer->counts[param.name()] = states.counts;
    for (const auto& [name, value] : states.tensors) {
      TensorRecord record = record_of(param);
      record.kind = "state";
      record.state = name;
      record.dtype = safetensors_dtype(value.scalar_type());
      add_part(std::move(record), param, flat_state(value, tensor));
    }
  }

  const ModelView& view_;
  int rank_;
  RankContents contents_;
};

}  // namespace

RankContents contents_of_rank(const ModelView& view, int rank, int size, bool with_model) {
  Collector collector(view, rank, size);
  with_model ? collector.add_model() : collector.add_masters();
  if (view.optimizer) collector.add_optimizer();
  return std::move(collector).take();
}

bool is_same_order(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != 1 && a[dim] != b[dim]) return false;
  }
  return true;
}

}  // namespace tessera
