#pragma once

#include <tessera/engine/fully_shard.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/engine/sharded_optimizer.h>

#include <filesystem>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

namespace tessera::paddle {

/// Paddle's clipping: gradients are multiplied by `clip_norm / max(norm, clip_norm)` at each step.
struct ClipGradByGlobalNorm {
  double clip_norm = 1.0;
  /// Names of parameters with `need_clip = false`: neither counted nor scaled.
  std::vector<std::string> no_clip = {};
};

/// The optional arguments of `group_sharded_parallel`, with Paddle's names and defaults. Values
/// mean the same as in Paddle unless stated here.
struct GroupShardedOptions {
  /// Skips steps whose gradients overflow; needed for fp16 parameters. `group_sharded_parallel`
  /// returns it, and `save_group_sharded_model` saves it.
  GradScaler* scaler = nullptr;
  /// Ranks to shard over; null: the default process group. One rank works, as plain training.
  ProcessGroupPtr group;
  /// Location of master weights and optimizer state: `false` or `"none"`: the device; `true` or
  /// `"cpu"`: host memory; another text: unnamed files in the directory of that name. At `p_g_os`
  /// this includes the shards.
  std::variant<bool, std::string> offload = false;
  bool sync_buffers = false;  ///< broadcast buffers from rank 0 before every forward of the wrapper
  int64_t buffer_max_size = int64_t{1}
                            << 23;  ///< elements of a unit (not bytes); 0: one per parameter
  int64_t segment_size = int64_t{1}
                         << 20;  ///< `p_g_os`: parameters of at most this many elements stay whole
  bool sync_comm = false;        ///< `p_g_os`: gathers units when used instead of ahead of use
  /// Ranks that hold the same shard as this one, and have the same rank number in their `group`s:
  /// gradients are reduced over `group`, then over these. See `World::hybrid_process_groups`.
  ProcessGroupPtr dp_group;
  /// `p_g_os`: modules whose parameters stay whole, by type name, dotted name or address.
  std::vector<std::variant<std::string, const torch::nn::Module*>> exclude_layer;

  // Options that Paddle takes from elsewhere, or lacks:

  /// Replaces the `grad_clip` of Paddle's optimizers; LibTorch's have none.
  std::optional<ClipGradByGlobalNorm> grad_clip;
  /// As in Paddle, fp16 and bf16 parameters have fp32 master weights.
  Precision precision = {.master_dtype = at::kFloat};
  /// `p_g_os`: see `ShardedOptimizerOptions::elementwise`.
  bool elementwise = false;
};

/// The optimizer as `group_sharded_parallel` returns it.
class GroupShardedOptimizer : public ShardedOptimizer {
 public:
  GroupShardedOptimizer(const ShardedModule& module, torch::optim::Optimizer& optimizer,
                        const ShardedOptimizerOptions& options, GradScaler* scaler)
      : ShardedOptimizer(module, optimizer, options), scaler_(scaler) {}
  /// The scaler given to `group_sharded_parallel`, or null.
  GradScaler* scaler() const { return scaler_; }
  void clear_grad() { zero_grad(); }
  TESSERA_API double get_lr() const;
  TESSERA_API void set_lr(double lr);
  /// Throws `std::runtime_error`, as in Paddle: use `step()`.
  [[noreturn]] TESSERA_API void minimize(const at::Tensor& loss);

 private:
  GradScaler* scaler_;
};

template <class M>
struct GroupSharded {
  Sharded<M> model;
  GroupShardedOptimizer optimizer;
  GradScaler* scaler;  ///< the one in the options, or null

  /// Undoes `group_sharded_parallel`: the module's parameters are ordinary tensors again, and the
  /// optimizer steps them with all of its state. Collective; see `ShardedOptimizer::unwrap()` and
  /// `ShardedModule::unwrap()`.
  void unwrap() {
    optimizer.unwrap();
    model.unwrap();
  }
};

/// Translates the options for gradient clipping.
TESSERA_API ShardedOptimizerOptions
group_sharded_optimizer_options(const GroupShardedOptions& options);

/// Translates Paddle's arguments. Throws `c10::ValueError` for those that Paddle refuses.
TESSERA_API ShardPlan group_sharded_plan(const torch::nn::Module& model, const std::string& level,
                                         const GroupShardedOptions& options);

namespace detail {
/// Returns the plan after checks on all ranks: a check that fails on one rank fails on all, before
/// anything is changed. Collective.
TESSERA_API ShardPlan check_group_sharded(const torch::nn::Module& model,
                                          const torch::optim::Optimizer& optimizer,
                                          const std::string& level,
                                          const GroupShardedOptions& options);
}  // namespace detail

/// Shards `model` and makes `optimizer` step on the shards. `level`: `os` (as `os_g`), `os_g` or
/// `p_g_os`. Collective. See `dialects/paddle/group_sharded.md`.
template <class ModulePtr>  // or a holder
auto group_sharded_parallel(const ModulePtr& model, torch::optim::Optimizer& optimizer,
                            const std::string& level, const GroupShardedOptions& options = {}) {
  const ShardPlan plan = detail::check_group_sharded(*model, optimizer, level, options);
  const auto sharded = fully_shard(model, plan);
  return GroupSharded<std::remove_reference_t<decltype(*sharded)>>{
      sharded,
      GroupShardedOptimizer(sharded, optimizer, group_sharded_optimizer_options(options),
                            options.scaler),
      options.scaler};
}

/// Saves a model that `group_sharded_parallel` sharded into the directory `output`. Creates it if
/// needed. Saves the parameters, whole and by name, in files that Python's `safetensors` opens
/// (`model-*.safetensors`), and, if the optimizer is given, all ranks' parts of its state, its
/// scaler and its step. Collective.
///
/// Atomic: if a job is killed while it saves, the previous checkpoint remains. Gathers one unit of
/// parameters at a time. `load_group_sharded_model` reads it at any number of ranks and level.
/// Throws `c10::ValueError` if `output` is a file or the model is not sharded.
TESSERA_API void save_group_sharded_model(const ShardedModule& model,
                                          const std::filesystem::path& output,
                                          const GroupShardedOptimizer* optimizer = nullptr);
/// Saves the module that was sharded in place.
TESSERA_API void save_group_sharded_model(const torch::nn::Module& model,
                                          const std::filesystem::path& output,
                                          const GroupShardedOptimizer* optimizer = nullptr);

/// Reads a checkpoint of `save_group_sharded_model` into a sharded model; collective. Pass the
/// optimizer to restore its state, scaler and step as well.
TESSERA_API void load_group_sharded_model(ShardedModule& model, const std::filesystem::path& input,
                                          GroupShardedOptimizer* optimizer = nullptr);
/// The same before the model is sharded; each rank reads by itself.
TESSERA_API void load_group_sharded_model(torch::nn::Module& model,
                                          const std::filesystem::path& input,
                                          torch::optim::Optimizer* optimizer = nullptr,
                                          GradScaler* scaler = nullptr);

}  // namespace tessera::paddle
