#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>
#include <tessera/checkpoint.h>
#include <tessera/grad_scaler.h>
#include <torch/optim/optimizer.h>

#include <optional>
#include <utility>
#include <vector>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/fit.h"
#include "checkpoint/model_view.h"
#include "checkpoint/optimizer_options.h"
#include "checkpoint/safetensors.h"
#include "optim/param_state.h"
#include "optim/sharded_optimizer_access.h"

namespace tessera {
namespace {

constexpr CollectiveTag kTag{"checkpoint", Channel::kControl};

// A range of a stored tensor, and the memory that it goes to.
struct Target {
  const TensorRecord* source;
  std::vector<int64_t> strides;  // whose order of memory the elements are counted in
  int64_t begin, end;
  at::Tensor out;
};

struct StateTarget {
  at::Tensor param;  // the optimizer's
  ParamState state;  // empty if the checkpoint has none
};

// Plans a load, which can fail, before it changes anything.
class Loader {
 public:
  Loader(const std::filesystem::path& path, ModelView view, GradScaler* scaler)
      : reader_(path), table_(reader_.index()), view_(std::move(view)), scaler_(scaler) {
    check_fit(reader_.index(), table_, view_, scaler, path.string());
    plan_model();
    if (view_.optimizer) plan_optimizer();
    for (const Target& target : targets_) {
      const bool reordered = target.strides != target.source->strides;
      reader_.check(*target.source, reordered ? 0 : target.begin,
                    reordered ? target.source->numel() : target.end);
    }
  }

  const CheckpointIndex& index() const { return reader_.index(); }

  void load() {
    for (const Target& target : targets_) read(target);
    if (view_.optimizer) set_optimizer();
    if (scaler_) scaler_->load_state(index().scaler);
  }

 private:
  void read(const Target& target) {
    const at::ScalarType dtype = scalar_type_of(target.source->dtype);
    const bool converts = target.out.scalar_type() != dtype;
    const at::Tensor out =
        converts ? at::empty(target.out.sizes(), target.out.options().dtype(dtype)) : target.out;
    reader_.read(*target.source, target.strides, target.begin, target.end, out);
    if (converts) target.out.copy_(out);
  }

  void plan_model() {
    for (const ParamView& param : view_.params) {
      if (param.begin == param.end) continue;
      targets_.push_back(
          {&table_.source_of(param), param.strides, param.begin, param.end, param.values});
    }
    for (const NamedTensor& buffer : view_.buffers) {
      if (buffer.tensor.numel() == 0) continue;
      const TensorRecord* source = table_.find("buffer", buffer.name);
      targets_.push_back({source, source->strides, 0, source->numel(), buffer.tensor});
    }
  }

  void plan_optimizer() {
    for (const auto& [place, param_group, tensor] : view_.optimized) {
      if (!tensor.defined()) continue;
      const ParamView& param = view_.params[place];
      const TensorRecord& record = *table_.find("param", param.name());
      ParamState state{.tensors = {}, .counts = table_.counts_of(record)};
      for (const TensorRecord* source : table_.states_of(record)) {
        at::Tensor value = memory_for(tensor, source->state, scalar_type_of(source->dtype));
        targets_.push_back({source, param.strides, param.begin, param.end,
                            at::as_strided(value, {value.numel()}, {1}, value.storage_offset())});
        state.tensors[source->state] = std::move(value);
      }
      states_.push_back({tensor, std::move(state)});
    }
  }

  // The tensor that the optimizer has for this state, so that none is there twice, or a new one.
  at::Tensor memory_for(const at::Tensor& param, const std::string& state,
                        at::ScalarType dtype) const {
    std::vector<int64_t> strides = param.strides().vec();
    if (!param.is_non_overlapping_and_dense()) {
      const auto contiguous = c10::contiguous_strides(param.sizes());
      strides.assign(contiguous.begin(), contiguous.end());
    }
    const ParamState present = read_param_state(*view_.optimizer, param);
    const auto it = present.tensors.find(state);
    if (it != present.tensors.end() && it->second.sizes() == param.sizes() &&
        it->second.strides() == at::IntArrayRef(strides) && it->second.scalar_type() == dtype) {
      return it->second;
    }
    return at::empty_strided(param.sizes(), strides,
                             param.options().dtype(dtype).requires_grad(false));
  }

  void set_optimizer() {
    torch::optim::Optimizer& optimizer = *view_.optimizer;
    for (const StateTarget& target : states_) {
      if (target.state.tensors.empty() && target.state.counts.empty()) {
        optimizer.state().erase(target.param.unsafeGetTensorImpl());
      } else {
        write_param_state(optimizer, target.param, target.state);
      }
    }
    const OptimizerRecord& record = *index().optimizer;
    for (size_t group = 0; group < record.param_groups.size(); ++group) {
      write_options(record.kind, optimizer.param_groups()[group],
                    record.param_groups[group].options);
    }
  }

  ChunkReader reader_;
  TensorTable table_;
  ModelView view_;
  GradScaler* scaler_;
  std::vector<Target> targets_;
  std::vector<StateTarget> states_;
};

void check_same_checkpoint(const ShardMesh& mesh, const std::string& id) {
  for (const std::string& other : mesh.all_gather_bytes(id, kTag)) {
    TORCH_CHECK_VALUE(
        other == id, "[load_checkpoint] all ranks must read the same checkpoint; got those of ids ",
        id, " and ", other, " (was it replaced, or is the path another one on some machine?)");
  }
}

}  // namespace

std::map<std::string, double> load_checkpoint(const std::filesystem::path& path,
                                              ShardedModule& module, ShardedOptimizer* optimizer,
                                              GradScaler* scaler) {
  at::NoGradGuard no_grad;
  ShardedState& state = *module.state();
  std::optional<Loader> loader;
  check_on_all_ranks(
      state.mesh(), [&] { loader.emplace(path, view_of(state, optimizer), scaler); }, "checkpoint");
  check_same_checkpoint(state.mesh(), loader->index().id);
  state.overwrite([&] {
    check_on_all_ranks(
        state.mesh(), [&] { loader->load(); }, "checkpoint");
  });
  if (optimizer) {
    offload_state(*optimizer);
    optimizer->set_steps(loader->index().optimizer->steps);
  }
  return loader->index().numbers;
}

std::map<std::string, double> load_checkpoint(const std::filesystem::path& path,
                                              torch::nn::Module& module,
                                              torch::optim::Optimizer* optimizer,
                                              GradScaler* scaler) {
  at::NoGradGuard no_grad;
  Loader loader(path, view_of(module, optimizer), scaler);
  loader.load();
  return loader.index().numbers;
}

}  // namespace tessera
