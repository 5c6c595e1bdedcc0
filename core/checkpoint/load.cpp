#include "checkpoint/load.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/world.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/files/untrusted.h"
#include "base/memory/dense_strides.h"
#include "checkpoint/additional_state.h"
#include "checkpoint/chunk_reader.h"
#include "checkpoint/fit.h"
#include "checkpoint/model_view.h"
#include "checkpoint/planned_reads.h"
#include "checkpoint/safetensors.h"
#include "comm/group/progress.h"
#include "engine/optim/averaged_weights.h"
#include "engine/optim/param_state.h"
#include "engine/optim/sharded_optimizer_access.h"
#include "engine/optim/state_shape.h"
#include "tensor/dist_meta.h"
#include "tensor/shard_mesh.h"

namespace tessera {
namespace {

struct StateTarget {
  at::Tensor param;  // the optimizer's
  ParamState state;  // empty if the checkpoint has none
};

// Plans a load before anything is changed. May throw.
class Loader {
 public:
  Loader(const std::filesystem::path& path, ModelView view, const LoadOptions& options, int rank,
         int ranks, bool wants_several = false)
      : reads_(ChunkReader(path)),
        view_(std::move(view)),
        options_(options),
        rank_(rank),
        ranks_(ranks) {
    check_number_of_models(path, wants_several);
    check_fit(index(), reads_.table, view_, options, path.string(), loaded_);
    plan_model();
    if (view_.optimizer) plan_optimizer();
    plan_rank_state();
    loaded_.numbers = index().numbers;
    loaded_.texts = index().texts;
  }

  const CheckpointIndex& index() const { return reads_.reader.index(); }
  /// The momentum of averages of replicas that the rank of this number saved.
  const std::map<std::string, at::Tensor>& outer_momentum() const { return outer_momentum_; }
  /// Throws `c10::ValueError` if there is such momentum, saved by another number of ranks.
  void check_ranks_of_momentum() const {
    const bool any = std::ranges::any_of(index().tensors, [](const TensorRecord& record) {
      return record.kind == "rank" &&
             record.names.front().starts_with(std::string(kOuterMomentum) + "/");
    });
    TORCH_CHECK_VALUE(!any || index().world_size == ranks_,
                      "[load_checkpoint] the momentum of plan.outer was saved by replicas of ",
                      index().world_size, " ranks, which must load it; this one has ", ranks_,
                      ". Load the model alone, without the optimizer");
  }

  LoadedCheckpoint load() {
    reads_.read();
    if (view_.optimizer) set_optimizer();
    if (options_.scaler) options_.scaler->load_state(index().scaler);
    for (size_t i = 0; i < options_.schedulers.size(); ++i)
      write_scheduler(options_.schedulers[i], index().schedulers[i]);
    if (options_.random_state) write_random_state(random_state_);
    return loaded_;
  }

 private:
  void check_number_of_models(const std::filesystem::path& path, bool wants_several) const {
    TORCH_CHECK_VALUE(
        wants_several || index().models.empty(), "[load_checkpoint] '", path.string(),
        "' holds several models (", fmt::format("{}", fmt::join(index().models, ", ")),
        "): load all of them, or one from '", (path / index().models.front()).string(), "'");
    const bool has_one = std::ranges::any_of(index().tensors, is_of_model);
    TORCH_CHECK_VALUE(!wants_several || !has_one, "[load_checkpoint] '", path.string(),
                      "' holds one model without a name: load it alone");
  }

  void plan_model() {
    for (const ParamView& param : view_.params) {
      const TensorRecord* source = reads_.table.source_of(param);
      reads_.add(param.is_rank_own ? own_or(source, param.name()) : source, param.strides,
                 param.region(), param.values, param.tensors);
    }
    for (const NamedTensor& buffer : view_.buffers) {
      const TensorRecord* source = reads_.table.find("buffer", buffer.name);
      reads_.add(is_dist(buffer.tensor) ? source : own_or(source, buffer.name),
                 row_major(buffer.tensor.sizes()), region_of(buffer.tensor, buffer.name),
                 local_of(buffer.tensor), {buffer.tensor});
    }
  }

  // With as many ranks as saved, each rank gets its own values back if they differed from rank 0's.
  const TensorRecord* own_or(const TensorRecord* of_all, const std::string& name) const {
    const TensorRecord* own = reads_.table.find("rank/" + std::to_string(rank_), "buffer/" + name);
    const bool fits = own && of_all && index().world_size == ranks_ &&
                      own->shape == of_all->shape && own->dtype == of_all->dtype;
    return fits ? own : of_all;
  }

  void plan_optimizer() {
    const std::map<std::string, size_t> saved = reads_.table.saved_groups();
    const OtherShapes others = other_shapes(*view_.optimizer);
    for (const auto& [place, param_group, tensor] : view_.optimized) {
      if (!tensor.defined()) continue;
      const ParamView& param = view_.params[place];
      const TensorRecord* record = reads_.table.find("param", param.name());
      if (!record || !saved.contains(record->names.front())) continue;
      ParamState state{.tensors = {}, .counts = reads_.table.counts_of(*record)};
      naming_part("'" + reads_.reader.path() + "'",
                  [&] { check_counts(*view_.optimizer, state.counts); });
      for (const TensorRecord* source : reads_.table.states_of(*record)) {
        if (others.contains(source->state) && !is_dist(tensor)) {
          state.tensors[source->state] = plan_other(tensor, param, *source);
          continue;
        }
        at::Tensor value = memory_for(tensor, source->state, scalar_type_of(source->dtype));
        if (is_dist(value)) {
          reads_.add(source, row_major(value.sizes()), region_of(value, source->id()),
                     local_of(value));
        } else {
          const ParamView own = is_scale(source->state) ? view_of_scales(param) : param;
          reads_.add(source, own.strides, own.region(),
                     at::as_strided(value, {value.numel()}, {1}, value.storage_offset()));
        }
        state.tensors[source->state] = std::move(value);
      }
      states_.push_back({tensor, std::move(state)});
    }
  }

  // Plans to read state that may have another shape than its parameter's.
  at::Tensor plan_other(const at::Tensor& tensor, const ParamView& param,
                        const TensorRecord& source) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        tensor.numel() == param.numel(), "[load_checkpoint] '", source.id(),
        "' may have another shape than its parameter, which must be whole: see plan.cuts");
    reads_.reader.check(source);  // before memory is allocated
    const auto options = tensor.options().dtype(scalar_type_of(source.dtype)).requires_grad(false);
    at::Tensor value = at::empty_strided(source.shape, source.strides, options);
    reads_.add(&source, source.strides, {0, value.numel()},
               at::as_strided(value, {value.numel()}, {1}));
    return value;
  }

  // Plans to restore the tensors that belong to this rank alone.
  void plan_rank_state() {
    for (const TensorRecord& record : index().tensors) {
      if (record.kind != "rank" || record.rank() != rank_) continue;
      const std::string& name = record.names.front();
      const size_t slash = name.find('/');
      if (name.starts_with("buffer/")) continue;
      const std::string group = name.substr(0, slash);
      const bool is_random = group == "random";
      if (is_random && !options_.random_state) continue;
      reads_.reader.check(record);  // before memory is allocated
      const at::Tensor value = at::empty(record.shape, scalar_type_of(record.dtype));
      reads_.add(&record, record.strides, {0, record.numel()}, value);
      auto& values = group == kOuterMomentum ? outer_momentum_
                     : is_random             ? random_state_
                                             : loaded_.rank_state;
      values[name.substr(slash + 1)] = value;
    }
  }

  // Returns the optimizer's own tensor for this state, to avoid a second copy, or a new one; for a
  // DistTensor, placed like the existing state, or else like the parameter.
  at::Tensor memory_for(const at::Tensor& param, const std::string& state,
                        at::ScalarType dtype) const {
    const ParamState present = read_param_state(*view_.optimizer, param);
    const auto it = present.tensors.find(state);
    const bool exists = it != present.tensors.end() && it->second.scalar_type() == dtype;
    if (const DistMeta* meta = find_dist_meta(param)) {
      return exists ? it->second
                    : make_dist(at::empty(meta->local.sizes(), meta->local.options().dtype(dtype)),
                                meta->spec, param.sizes());
    }
    const std::vector<int64_t> sizes = state_sizes(state, param.sizes());
    const std::vector<int64_t> strides = is_scale(state) ? row_major(sizes) : dense_strides(param);
    if (exists && it->second.sizes() == at::IntArrayRef(sizes) &&
        it->second.strides() == at::IntArrayRef(strides)) {
      return it->second;
    }
    return at::empty_strided(sizes, strides, param.options().dtype(dtype).requires_grad(false));
  }

  void set_optimizer() {
    torch::optim::Optimizer& optimizer = *view_.optimizer;
    for (const StateTarget& target : states_) {
      if (target.state.tensors.empty() && target.state.counts.empty()) {
        erase_param_state(optimizer, target.param);
      } else {
        write_param_state(optimizer, target.param, target.state);
      }
    }
    const OptimizerRecord& record = *index().optimizer;
    for (size_t group = 0; group < record.param_groups.size(); ++group) {
      auto options = record.param_groups[group].options;
      if (record.kind == "CPUAdam") options.erase(kStateDtype);
      write_options(optimizer, group, options);
    }
  }

  PlannedReads reads_;
  ModelView view_;
  const LoadOptions& options_;
  int rank_, ranks_;
  LoadedCheckpoint loaded_;
  std::map<std::string, at::Tensor> random_state_, outer_momentum_;
  std::vector<StateTarget> states_;
};

// Keeps what `plan()` has planned. Some loads add to `load()`.
class LoaderLoad : public ModelLoad {
 public:
  using ModelLoad::ModelLoad;

  const CheckpointIndex& index() const override { return loader_->index(); }
  LoadedCheckpoint load() override {
    LoadedCheckpoint loaded;
    ranks().check([&] { loaded = loader_->load(); }, "checkpoint");
    return loaded;
  }

 protected:
  std::optional<Loader> loader_;
};

class ShardedLoad : public LoaderLoad {
 public:
  ShardedLoad(ShardedModule module, ShardedOptimizer* optimizer)
      : LoaderLoad(Ranks::of(module.state()->mesh())),
        state_(module.state()),
        optimizer_(optimizer),
        outer_(optimizer ? OptimizerAccess(*optimizer).outer_steps() : nullptr) {
    state_->check_not_exchanged("load_checkpoint");
    state_->take_in_replaced();
    state_->thaw_trained();
  }

  void plan(const std::filesystem::path& path, const LoadOptions& options) override {
    loader_.emplace(path, view_of(*state_, optimizer_), options, ranks().rank(), ranks().size());
    if (!outer_ || state_->plan().outer->momentum == 0) return;
    loader_->check_ranks_of_momentum();
    outer_->check_momentum(loader_->outer_momentum());
  }

  LoadedCheckpoint load() override {
    LoadedCheckpoint loaded;
    state_->overwrite([&] { loaded = LoaderLoad::load(); });
    if (!optimizer_) return loaded;
    OptimizerAccess(*optimizer_).offload_state();
    if (outer_) outer_->set_momentum(loader_->outer_momentum());
    optimizer_->set_steps(index().optimizer->steps);
    return loaded;
  }

 private:
  std::shared_ptr<ShardedState> state_;
  ShardedOptimizer* optimizer_;
  OuterSteps* outer_;
};

// For a module that is not sharded: the ranks of the default world load it.
class PlainLoad : public LoaderLoad {
 public:
  PlainLoad(ProcessGroupPtr all, torch::nn::Module& module, torch::optim::Optimizer* optimizer)
      : LoaderLoad(Ranks({all.get()})),
        all_(std::move(all)),
        module_(module),
        optimizer_(optimizer) {}

  void plan(const std::filesystem::path& path, const LoadOptions& options) override {
    loader_.emplace(path, view_of(module_, optimizer_), options, all_->rank(), all_->size());
  }

 private:
  ProcessGroupPtr all_;
  torch::nn::Module& module_;
  torch::optim::Optimizer* optimizer_;
};

class AverageLoad : public LoaderLoad {
 public:
  explicit AverageLoad(std::shared_ptr<AveragedWeights> average)
      : LoaderLoad(Ranks::of(average->state->mesh())), average_(std::move(average)) {}

  void plan(const std::filesystem::path& path, const LoadOptions& options) override {
    TORCH_CHECK_VALUE(!average_->is_swapped,
                      "[load_checkpoint] the model has the averaged values: call swap() first");
    average_->prepare(/*of_all=*/true);
    loader_.emplace(path, view_of(*average_), options, ranks().rank(), ranks().size());
  }
  LoadedCheckpoint load() override {
    LoadedCheckpoint loaded = LoaderLoad::load();
    const auto it = loaded.numbers.find("updates");  // none in a checkpoint of the model alone
    average_->updates = it == loaded.numbers.end() ? 1 : static_cast<int64_t>(it->second);
    return loaded;
  }

 private:
  std::shared_ptr<AveragedWeights> average_;
};

class OptionsLoad : public LoaderLoad {
 public:
  using LoaderLoad::LoaderLoad;

  void plan(const std::filesystem::path& path, const LoadOptions& options) override {
    loader_.emplace(path, ModelView{}, options, ranks().rank(), ranks().size(),
                    /*wants_several=*/true);
  }
};

// Plans to read tensors by name. Returns the names that the checkpoint lacks.
std::vector<std::string> plan_tensors(const std::filesystem::path& path, const StateDict& state,
                                      PlannedReads& reads) {
  std::vector<std::string> errors, missing;
  for (const auto& [name, tensor] : state) {
    const TensorRecord* source = reads.table.find("param", name);
    if (!source) {
      missing.push_back(name);
    } else if (const std::string error = describe_misfit(*source, name, tensor); !error.empty()) {
      errors.push_back(error);
    } else {
      reads.add(source, row_major(tensor.sizes()), region_of(tensor, name),
                local_of(tensor).detach(), {tensor});
    }
  }
  TORCH_CHECK_VALUE(errors.empty(), "[load_state_dict] the checkpoint '", path.string(),
                    "' must fit the tensors; ", fmt::format("{}", fmt::join(errors, ", ")));
  return missing;
}

}  // namespace

void check_same_checkpoint(const Ranks& ranks, const std::string& id) {
  for (const std::string& other : ranks.all_gather_bytes(id, kCheckpointTag)) {
    TORCH_CHECK_VALUE(
        other == id, "[load_checkpoint] all ranks must read the same checkpoint; got those of ids ",
        id, " and ", other, " (was it replaced, or is the path another one on some machine?)");
  }
}

std::unique_ptr<ModelLoad> load_of(ShardedModule& module, ShardedOptimizer* optimizer) {
  return std::make_unique<ShardedLoad>(module, optimizer);
}
std::unique_ptr<ModelLoad> load_of(torch::nn::Module& module, torch::optim::Optimizer* optimizer) {
  return std::make_unique<PlainLoad>(default_process_group(), module, optimizer);
}
std::unique_ptr<ModelLoad> load_of(const std::shared_ptr<AveragedWeights>& average) {
  return std::make_unique<AverageLoad>(average);
}
std::unique_ptr<ModelLoad> load_of_options(const Ranks& ranks) {
  return std::make_unique<OptionsLoad>(ranks);
}

LoadedCheckpoint load_checkpoint(const std::filesystem::path& path, ShardedModule& module,
                                 ShardedOptimizer* optimizer, const LoadOptions& options) {
  at::NoGradGuard no_grad;
  const PhaseScope phase(module.state()->context().progress, Phase::kLoad);
  const auto load = load_of(module, optimizer);
  load->ranks().check([&] { load->plan(path, options); }, "checkpoint");
  check_same_checkpoint(load->ranks(), load->index().id);
  return load->load();
}

LoadedCheckpoint load_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                                 torch::optim::Optimizer* optimizer, const LoadOptions& options) {
  at::NoGradGuard no_grad;
  const ProcessGroupPtr all = default_process_group();
  const PhaseScope phase(progress_of(*all), Phase::kLoad);
  Loader loader(path, view_of(module, optimizer), options, all->rank(), all->size());
  return loader.load();
}

std::vector<std::string> load_state_dict(const std::filesystem::path& path,
                                         const StateDict& state) {
  at::NoGradGuard no_grad;
  const ProcessGroupPtr all = default_process_group();
  const PhaseScope phase(progress_of(*all), Phase::kLoad);
  const Ranks ranks({all.get()});
  std::optional<PlannedReads> reads;
  std::vector<std::string> missing;
  ranks.check([&] { missing = plan_tensors(path, state, reads.emplace(ChunkReader(path))); },
              "checkpoint");
  check_same_checkpoint(ranks, reads->reader.index().id);
  ranks.check([&] { reads->read(); }, "checkpoint");
  if (!missing.empty() && ranks.rank() == 0) {
    TORCH_WARN(
        "[load_state_dict] the checkpoint '", path.string(),
        "' lacks these, which stay as they are: ", fmt::format("{}", fmt::join(missing, ", ")));
  }
  return missing;
}

}  // namespace tessera
