#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/cpu_adam.h>
#include <tessera/fully_shard.h>
#include <tessera/optimizer_state_dict.h>
#include <tessera/sharded_optimizer.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// ColossalAI's ZeRO. See `docs/dialects/colossalai.md`.
namespace tessera::colossalai {

using tessera::CPUAdam;
using tessera::CPUAdamOptions;
using tessera::HybridAdam;

/// Says how parameters are cut, and which of them are gathered together. Derive from it to have
/// your own.
class TESSERA_API BaseShardStrategy {
 public:
  virtual ~BaseShardStrategy();
  /// Writes its part of `plan`: units or their size, partition and owners, what stays whole. All
  /// ranks must write the same.
  virtual void apply(const torch::nn::Module& module, ShardPlan& plan) const = 0;
};

/// Each parameter is cut into equal parts, and gathered by itself.
class TESSERA_API TensorShardStrategy : public BaseShardStrategy {
 public:
  void apply(const torch::nn::Module& module, ShardPlan& plan) const override;
};

/// The same parts; the parameters of a submodule (not those of its children) are gathered at once.
class TESSERA_API BucketTensorShardStrategy : public BaseShardStrategy {
 public:
  void apply(const torch::nn::Module& module, ShardPlan& plan) const override;
};

using ShardStrategyPtr = std::shared_ptr<const BaseShardStrategy>;

struct ZeroInitOptions {
  /// Each rank is to keep its part of the parameters only (ZeRO 3); false: all of them, and parts
  /// of gradients and optimizer state (ZeRO 2).
  bool shard_param = false;
  /// Parameters get no memory before the model is wrapped or used, whatever the constructors do
  /// with them: no rank ever has the whole model. False: they have it at once. (ColossalAI's
  /// default; there, true breaks models that initialize parameters after construction.)
  bool rm_torch_payload_on_the_fly = true;
  /// One element of dtype Int or Long; the number of elements of the trainable parameters that were
  /// made is added to it when the context ends. (A sum that an Int can't hold is warned of, and is
  /// the largest Int then.)
  at::Tensor model_numel_tensor = {};
  /// The ranks that the model is for; null: those that `ShardedModelV2` is given.
  ProcessGroupPtr dp_process_group = nullptr;
  /// What the model computes with; kHalf, kBFloat16 or kFloat. The optimizer updates the values
  /// that the constructors have made, which are not rounded.
  at::ScalarType param_dtype = at::kHalf;
  /// Random numbers are drawn from this seed in the context; the generator goes on after it as if
  /// nothing had been drawn.
  std::optional<uint64_t> seed = std::nullopt;
};

namespace detail {
struct ZeroInitState;
struct NoShardState;
struct ModelState;
}  // namespace detail

/// While it lives, modules that this thread builds are built for `ShardedModelV2`, which must be
/// given a model that was:
///
///     auto net = [] {
///       ZeroInitContext context(torch::kCPU, std::make_shared<TensorShardStrategy>(),
///                               {.shard_param = true});
///       return std::make_shared<Net>();
///     }();
///
/// Parameters are what operators make in it. A tensor that was there before is none: clone it.
class TESSERA_API ZeroInitContext {
 public:
  /// `target_device`: where the wrapped model lies. Throws `c10::ValueError` for options that don't
  /// fit, or inside another context.
  ZeroInitContext(at::Device target_device, ShardStrategyPtr shard_strategy,
                  const ZeroInitOptions& options = {});
  ~ZeroInitContext();
  ZeroInitContext(const ZeroInitContext&) = delete;
  ZeroInitContext& operator=(const ZeroInitContext&) = delete;

 private:
  std::unique_ptr<detail::ZeroInitState> state_;
};

/// In a `ZeroInitContext`, while it lives: parameters stay whole on all ranks. With `is_replicated`
/// false they are each rank's own, too: never sent, and their gradients never reduced, as for
/// experts that ranks do not share.
class TESSERA_API NoShardZeroContext {
 public:
  explicit NoShardZeroContext(bool is_replicated = true);
  ~NoShardZeroContext();
  NoShardZeroContext(const NoShardZeroContext&) = delete;
  NoShardZeroContext& operator=(const NoShardZeroContext&) = delete;

 private:
  std::unique_ptr<detail::NoShardState> state_;
};

/// Throws `c10::ValueError` outside of a `ZeroInitContext`.
[[nodiscard]] inline NoShardZeroContext no_shard_zero_context(bool is_replicated = true) {
  return NoShardZeroContext(is_replicated);
}
/// `make`, called in such a context.
template <class F>
auto no_shard_zero_decorator(F make, bool is_replicated = true) {
  return [make = std::move(make), is_replicated](auto&&... args) -> decltype(auto) {
    const NoShardZeroContext context(is_replicated);
    return make(std::forward<decltype(args)>(args)...);
  };
}

struct ShardedModelV2Options {
  /// Null: that of the `ZeroInitContext`, or the default process group.
  ProcessGroupPtr process_group;
  /// Null, or `process_group`: Tessera's collectives do not wait for each other, so one is enough.
  ProcessGroupPtr reduce_scatter_process_group;
  /// Gradients are reduced in buckets of about so many MiB of whole gradients; 0 or less: each unit
  /// by itself.
  double reduce_scatter_bucket_size_mb = 25;
  /// Gradients travel as fp32.
  bool fp32_reduce_scatter = false;
  /// `{{"device", "cpu"}}`: as `tensor_placement_policy = "cpu"`.
  std::map<std::string, std::string> offload_config;
  /// "cuda": master weights and optimizer state are on the device of the parameters; "cpu": they
  /// are in host memory, where the optimizer steps; "auto": as "cuda", and as many gathered
  /// parameters stay as fit into `memory_budget`, those first that are used next.
  std::string tensor_placement_policy = "cuda";
  /// Bytes that this rank may use on its device. "auto" needs it, and so does
  /// `gpu_margin_mem_ratio` of the optimizer.
  std::optional<int64_t> memory_budget = std::nullopt;
  /// Gradients are divided by this before their reduction, and by ranks / this after it. None: a
  /// power of two near the root of the number of ranks.
  std::optional<double> gradient_predivide_factor = 1.0;
  /// Look at memory while the model trains. See `dump_memory_stats()`.
  bool use_memory_tracer = false;
  /// Keep no shard in `param_dtype` beside the one that the optimizer updates: gathers round it.
  /// Any number of backwards may precede a step all the same.
  bool reuse_fp16_shard = false;
  /// Take rank 0's buffers, such as the statistics of batch norms, before every forward. False, as
  /// in ColossalAI, which can't do it: each rank has those of its own rows, which drift apart.
  bool sync_buffers = false;
};

/// What `ShardedModelV2` is whatever module it wraps. All members are collective unless they say
/// otherwise.
class TESSERA_API AnyShardedModelV2 {
 public:
  AnyShardedModelV2(const AnyShardedModelV2&) = delete;
  AnyShardedModelV2& operator=(const AnyShardedModelV2&) = delete;

  /// Backward, whose gradients are reduced and added to those that are there.
  void backward(const at::Tensor& loss);
  /// The same from the gradient of `tensor`, as between the stages of a pipeline.
  void backward_by_grad(const at::Tensor& tensor, const at::Tensor& grad);
  /// Forgets all gradients; not `set_to_none`: makes zeros of them, and parameters that the next
  /// backward does not use are stepped with those. Not collective; all ranks must do it.
  void zero_grad(bool set_to_none = true);

  /// All parameters and buffers on the CPU, as those of a module that was converted to
  /// `param_dtype`.
  std::vector<NamedTensor> state_dict();
  /// Throws `c10::ValueError` on every rank, and changes nothing, if a shape differs; `strict`:
  /// also if names do. Values of any floating dtype, the same on all ranks; the optimizer goes on
  /// from them unrounded.
  void load_state_dict(const std::vector<NamedTensor>& state, bool strict = true);

  /// With `use_memory_tracer`: writes what was in memory on rank 0 at each event of the last steps:
  /// `filename`, a picture of the last one beside it (`filename.svg`), and a trace for Chrome's
  /// viewer (`filename.json`). Not collective; does nothing on other ranks.
  void dump_memory_stats(const std::string& filename = "dump_mem_stats.log") const;

  /// Makes the module's parameters ordinary tensors of `param_dtype` with memory of their own,
  /// which hold all values: the module is as any other, and this of no use. See
  /// `ShardedModule::unwrap()`; an optimizer's `unwrap()` comes first.
  void unwrap();

  /// The engine's handle.
  ShardedModule sharded() const;

 protected:
  AnyShardedModelV2(torch::nn::Module& module, const ShardStrategyPtr& strategy,
                    const ShardedModelV2Options& options);
  ~AnyShardedModelV2();

 private:
  friend class ShardedOptimizerV2;
  std::shared_ptr<detail::ModelState> state_;
};

/// A model, built in a `ZeroInitContext`, whose parameters, gradients and optimizer state are
/// sharded. `Net`: a module's class, or the holder that TORCH_MODULE makes.
///
///     ShardedModelV2<Net> model(net, strategy);
///     ShardedOptimizerV2 optimizer(model, adam);
///     optimizer.backward(loss_fn(model.forward(x), y));
///     optimizer.step();
///
/// Throws `c10::ValueError` on every rank, and changes nothing, for a model that was built
/// elsewhere, is sharded already, or has a module with sharded and unsharded parameters of its own.
template <class Net>
class ShardedModelV2 final : public AnyShardedModelV2 {
 public:
  using Module = typename tessera::detail::ContainedModule<Net>::type;

  ShardedModelV2(std::shared_ptr<Module> module, const ShardStrategyPtr& shard_strategy,
                 const ShardedModelV2Options& options = {})
      : AnyShardedModelV2(*module, shard_strategy, options),
        net_(std::move(module), sharded().state()) {}
  template <tessera::detail::ModuleHolder Holder>
  ShardedModelV2(const Holder& holder, const ShardStrategyPtr& shard_strategy,
                 const ShardedModelV2Options& options = {})
      : ShardedModelV2(holder.ptr(), shard_strategy, options) {}

  /// The module's own `forward`; floating tensors among its arguments, also those in vectors,
  /// arrays, optionals, tuples and maps, are converted to `param_dtype`.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    return net_.forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// The module's own members.
  Module* operator->() const { return net_.ptr().get(); }
  Module& module() const { return *net_; }
  void train(bool on = true) { net_->train(on); }  ///< not collective
  void eval() { train(false); }

  /// Those of a `ModuleList`.
  decltype(auto) operator[](size_t index) const requires requires(const Module& module) {
    module[index];
  }
  { return (*net_)[index]; }
  size_t size() const requires requires(const Module& module) { module.size(); }
  { return net_->size(); }
  auto begin() const requires requires(Module& module) { module.begin(); }
  { return net_->begin(); }
  auto end() const requires requires(Module& module) { module.end(); }
  { return net_->end(); }

 private:
  Sharded<Module> net_;
};

struct ShardedOptimizerV2Options {
  /// Master weights and optimizer state are in host memory. Where they are is the model's
  /// `tensor_placement_policy`; this throws if that is not "cpu".
  bool cpu_offload = false;
  /// With `cpu_offload`: the share, from 0 to 1, of what the first step leaves of the model's
  /// `memory_budget`, which is then filled with master weights and optimizer state, for good. The
  /// model must have `use_memory_tracer`. The optimizer's class must be one whose state is known,
  /// such as `CPUAdam` or LibTorch's.
  double gpu_margin_mem_ratio = 0.0;
  double initial_scale = 65536.0;  ///< of the loss. (ColossalAI's 2^32 costs 17 skipped steps.)
  double min_scale = 1.0;
  double growth_factor = 2.0;      ///< after `growth_interval` steps without overflow
  double backoff_factor = 0.5;     ///< after `hysteresis` overflows since the last growth, and each
                                   ///< one after them
  int64_t growth_interval = 1000;  ///< steps
  int64_t hysteresis = 2;          ///< overflows
  double max_scale = 4294967296.0;
  /// Must be false: optimizer state of parameters that stay whole is sharded like all other, which
  /// changes no number.
  bool keep_unsharded = false;
  /// Null, or that of the model.
  ProcessGroupPtr dp_process_group;
  /// Ranks that have other parts of the model: if gradients overflow on one, all skip the step.
  ProcessGroupPtr mp_process_group;
};

/// What `ShardedOptimizerV2` consolidates: the state of the plain optimizer, and the scaler's.
struct ShardedOptimizerV2State {
  OptimizerStateDict optimizer;
  std::map<std::string, double> scaler;
};

/// Steps `optimizer`, which has the parameters of `model`, on this rank's part of them in fp32,
/// with a loss scale that adapts itself.
///
/// All members are collective unless they say otherwise. Learning rates are changed in
/// `optimizer` itself, so schedulers work.
class TESSERA_API ShardedOptimizerV2 {
 public:
  /// Both must outlive it. Throws `c10::ValueError` for options that don't fit, and
  /// `std::runtime_error` for `cpu_offload` with a model that is not offloaded.
  ShardedOptimizerV2(AnyShardedModelV2& model, torch::optim::Optimizer& optimizer,
                     const ShardedOptimizerV2Options& options = {});
  ~ShardedOptimizerV2();
  ShardedOptimizerV2(const ShardedOptimizerV2&) = delete;
  ShardedOptimizerV2& operator=(const ShardedOptimizerV2&) = delete;

  /// Multiplies by the scale, and calls the model's `backward`.
  void backward(const at::Tensor& loss);
  void backward_by_grad(const at::Tensor& tensor, const at::Tensor& grad);

  /// Unscales the gradients and updates the parameters. If a gradient is not finite on any rank, it
  /// warns, forgets all gradients and leaves the parameters alone, on all ranks. Returns whether it
  /// has stepped.
  bool step();

  /// Scales the gradients, unscaled, so that their norm is at most `max_norm`; returns the norm
  /// before. Throws with an `mp_process_group`, of which nobody knows what counts once.
  double clip_grad_norm(double max_norm, double norm_type = 2.0);
  double clip_grad_norm(const AnyShardedModelV2& model, double max_norm, double norm_type = 2.0);

  /// Forgets all gradients. Not collective; all ranks must do it.
  void zero_grad();

  /// On every rank, of any number of ranks; `load_state_dict` takes it on any other. With the
  /// master weights, so that a run goes on from it and the model's to the bit, whichever is loaded
  /// first; see `load_full_state_dict()`.
  ShardedOptimizerV2State state_dict();
  /// Warns if `state` has no scaler; that stays as it is then.
  void load_state_dict(const ShardedOptimizerV2State& state);

  /// Gives the parameters and the whole state back to the optimizer that it was made for; this is
  /// of no use then. See `ShardedOptimizer::unwrap()`.
  void unwrap();

  double loss_scale() const;  ///< not collective
  /// Bytes of master weights and optimizer state on CUDA devices and on the CPU. Not collective.
  std::pair<int64_t, int64_t> get_memory_usage() const;

  torch::optim::Optimizer& inner() const;
  ShardedOptimizer& sharded();  ///< the engine's, as for checkpoints

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::colossalai
