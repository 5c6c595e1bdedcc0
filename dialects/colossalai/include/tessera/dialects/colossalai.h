#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/cpu_adam.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/optimizer_state_dict.h>
#include <tessera/engine/sharded_optimizer.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// ColossalAI's ZeRO. See `dialects/colossalai/README.md`.
namespace tessera::colossalai {

using tessera::CPUAdam;
using tessera::CPUAdamOptions;
/// Steps parameters on any device, as `CPUAdam` does.
using HybridAdam = tessera::CPUAdam;

/// Decides how parameters are cut, and which are gathered together. Derive from it to write yours.
class TESSERA_API BaseShardStrategy {
 public:
  virtual ~BaseShardStrategy();
  /// Writes its part of `plan`: units or their size, partition and owners, and the parameters that
  /// stay whole. All ranks must write the same.
  virtual void apply(const torch::nn::Module& module, ShardPlan& plan) const = 0;
};

/// Cuts each parameter into equal parts, and gathers it by itself.
class TESSERA_API TensorShardStrategy : public BaseShardStrategy {
 public:
  void apply(const torch::nn::Module& module, ShardPlan& plan) const override;
};

/// Cuts into the same parts; gathers the parameters of a submodule (not of its children) at once.
class TESSERA_API BucketTensorShardStrategy : public BaseShardStrategy {
 public:
  void apply(const torch::nn::Module& module, ShardPlan& plan) const override;
};

using ShardStrategyPtr = std::shared_ptr<const BaseShardStrategy>;

struct ZeroInitOptions {
  /// True: each rank keeps only its part of the parameters (ZeRO 3). False: all of them, and parts
  /// of gradients and optimizer state (ZeRO 2).
  bool shard_param = false;
  /// True: parameters get no memory before the model is wrapped or used, even if the constructors
  /// apply operators to them: no rank ever has the whole model. False: they get it at once. (False
  /// is ColossalAI's default; there, true breaks models that initialize parameters after
  /// construction.)
  bool rm_torch_payload_on_the_fly = true;
  /// One element of dtype Int or Long, to which the number of elements of the trainable parameters
  /// made in the context is added when it ends. (An Int that can't hold the sum gets the largest.)
  at::Tensor model_numel_tensor = {};
  /// The ranks that the model is for; null: those given to `ShardedModelV2`.
  ProcessGroupPtr dp_process_group = nullptr;
  /// Dtype in which the model computes: kHalf, kBFloat16 or kFloat. The optimizer updates the
  /// unrounded values that the constructors have made.
  at::ScalarType param_dtype = at::kHalf;
  /// Seeds the generator for the context, after which it continues as if nothing had been drawn.
  std::optional<uint64_t> seed = std::nullopt;
};

namespace detail {
struct ZeroContext;
struct ModelState;
}  // namespace detail

/// While an instance lives, this thread builds modules for `ShardedModelV2`. That accepts only
/// models built in a context:
///
///     auto net = [] {
///       ZeroInitContext context(torch::kCPU, std::make_shared<TensorShardStrategy>(),
///                               {.shard_param = true});
///       return std::make_shared<Net>();
///     }();
///
/// Only tensors that operators make in the context become its parameters: clone older tensors.
class TESSERA_API ZeroInitContext {
 public:
  /// `target_device`: the device of the wrapped model. Throws `c10::ValueError` for invalid
  /// options, or inside another context.
  ZeroInitContext(at::Device target_device, ShardStrategyPtr shard_strategy,
                  const ZeroInitOptions& options = {});
  ~ZeroInitContext();

 private:
  std::unique_ptr<detail::ZeroContext> state_;
};

/// While an instance lives in a `ZeroInitContext`: parameters stay whole on all ranks. With
/// `is_replicated` false they are also each rank's own: never sent, and their gradients never
/// reduced, as for experts that ranks do not share. Does nothing outside of a `ZeroInitContext`: a
/// module that uses it can also be built as an ordinary one.
class TESSERA_API NoShardZeroContext {
 public:
  explicit NoShardZeroContext(bool is_replicated = true);
  ~NoShardZeroContext();

 private:
  std::unique_ptr<detail::ZeroContext> state_;
};

/// Enters a `NoShardZeroContext`.
[[nodiscard]] inline NoShardZeroContext no_shard_zero_context(bool is_replicated = true) {
  return NoShardZeroContext(is_replicated);
}
/// Returns a function that calls `make` in such a context.
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
  /// Must be null or `process_group`: in Tessera gathers and reductions do not wait for each other.
  ProcessGroupPtr reduce_scatter_process_group;
  /// Gradients are reduced in buckets of about this many MiB, whole; 0 or less: unit by unit.
  double reduce_scatter_bucket_size_mb = 25;
  /// Gradients are sent as fp32.
  bool fp32_reduce_scatter = false;
  /// `{{"device", "cpu"}}`: the same as `tensor_placement_policy = "cpu"`.
  std::map<std::string, std::string> offload_config;
  /// "cuda": master weights and optimizer state are on the device of the parameters; "cpu": they
  /// are in host memory, where the optimizer steps; "auto": as "cuda", and as many units stay
  /// unsharded as fit into `memory_budget`, first those that are used next.
  std::string tensor_placement_policy = "cuda";
  /// Bytes that this rank may use on its device. Required for "auto" and `gpu_margin_mem_ratio`.
  std::optional<int64_t> memory_budget = std::nullopt;
  /// Gradients are divided by this before their reduction, and by ranks / this after it. None: a
  /// power of two near the square root of the number of ranks.
  std::optional<double> gradient_predivide_factor = 1.0;
  /// Traces memory while the model trains. See `dump_memory_stats()`.
  bool use_memory_tracer = false;
  /// Keeps no shard in `param_dtype` besides the one that the optimizer updates: gathers round that
  /// one. Several backwards may still precede a step.
  bool reuse_fp16_shard = false;
  /// Takes rank 0's buffers, such as the statistics of batch norms, before every forward. False, as
  /// in ColossalAI, where this option is missing: each rank has the statistics of its own data, and
  /// they diverge.
  bool sync_buffers = false;
};

/// The part of `ShardedModelV2` that does not depend on the class of the wrapped module. All
/// members are collective unless they say otherwise.
class TESSERA_API AnyShardedModelV2 {
 public:
  AnyShardedModelV2(const AnyShardedModelV2&) = delete;
  AnyShardedModelV2& operator=(const AnyShardedModelV2&) = delete;

  /// Runs backward; reduces the gradients and adds them to those that are there.
  void backward(const at::Tensor& loss) { backward_by_grad(loss, /*grad=*/{}); }
  /// Runs backward from the gradient of `tensor`, as between the stages of a pipeline.
  void backward_by_grad(const at::Tensor& tensor, const at::Tensor& grad);
  /// Clears all gradients. If not `set_to_none`, they become zeros, and the optimizer steps
  /// parameters that the next backward does not use with zero gradients. Not collective; all ranks
  /// must call it.
  void zero_grad(bool set_to_none = true);

  /// Returns all parameters and buffers on the CPU, as of a module converted to `param_dtype`.
  std::vector<NamedTensor> state_dict();
  /// Loads values of any floating dtype, equal on all ranks; the optimizer continues from them
  /// unrounded. Throws `c10::ValueError` on every rank, and changes nothing, if a shape differs; if
  /// `strict`, also if names differ.
  void load_state_dict(const std::vector<NamedTensor>& state, bool strict = true);

  /// With `use_memory_tracer`: writes the memory of rank 0 at each event of the last steps to
  /// `filename`, a picture of the last step beside it (`filename.svg`), and a trace for Chrome's
  /// viewer (`filename.json`). Not collective; does nothing on other ranks.
  void dump_memory_stats(const std::string& filename = "dump_mem_stats.log") const;

  /// Makes the module's parameters ordinary tensors of `param_dtype` with memory of their own and
  /// the full values. Afterwards the module is an ordinary one, and this object must not be used.
  /// See `ShardedModule::unwrap()`; call an optimizer's `unwrap()` first.
  void unwrap();

  /// Returns Tessera's own handle of the sharded model.
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

  /// `module`: a pointer to it, or its holder.
  template <class ModulePtr>
  ShardedModelV2(const ModulePtr& module, const ShardStrategyPtr& shard_strategy,
                 const ShardedModelV2Options& options = {})
      : AnyShardedModelV2(*tessera::detail::pointer_to(module), shard_strategy, options),
        net_(tessera::detail::pointer_to(module), sharded().state()) {}

  /// Calls the module's own `forward`; converts floating tensors among its arguments, also those in
  /// vectors, arrays, optionals, tuples and maps, to `param_dtype`.
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

  /// The elements of a `ModuleList`.
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
  /// States that master weights and optimizer state are in host memory. The model's
  /// `tensor_placement_policy` decides where they are; the constructor throws if that is not "cpu".
  bool cpu_offload = false;
  /// With an offloaded model: fraction, from 0 to 1, of the part of its `memory_budget` that the
  /// first step leaves free. It is then filled with master weights and optimizer state,
  /// permanently. The model must have `use_memory_tracer`. The optimizer's class must be one whose
  /// state is known, such as `CPUAdam` or LibTorch's.
  double gpu_margin_mem_ratio = 0.0;
  double initial_scale = 65536.0;  ///< of the loss. (ColossalAI's 2^32 costs 17 skipped steps.)
  double min_scale = 1.0;
  double growth_factor = 2.0;      ///< after `growth_interval` steps without overflow
  double backoff_factor = 0.5;     ///< after `hysteresis` overflows since the last growth, and each
                                   ///< further one
  int64_t growth_interval = 1000;  ///< steps
  int64_t hysteresis = 2;          ///< overflows
  double max_scale = 4294967296.0;
  /// Must be false: optimizer state of parameters that stay whole is sharded like all other,
  /// without changing any result.
  bool keep_unsharded = false;
  /// Null, or that of the model.
  ProcessGroupPtr dp_process_group;
  /// Ranks that hold other parts of the model: if gradients overflow on one, all skip the step.
  ProcessGroupPtr mp_process_group;
  bool elementwise = false;  ///< see `ShardedOptimizerOptions::elementwise`
};

/// The consolidated state of `ShardedOptimizerV2`: that of the plain optimizer, and the scaler's.
struct ShardedOptimizerV2State {
  OptimizerStateDict optimizer;
  std::map<std::string, double> scaler;
};

/// Steps `optimizer`, made for the parameters of `model`, on this rank's part of them in fp32, with
/// an adaptive loss scale.
///
/// All members are collective unless they say otherwise. Learning rates are changed in
/// `optimizer` itself; schedulers work.
class TESSERA_API ShardedOptimizerV2 {
 public:
  /// Both must outlive this object. Throws `c10::ValueError` for invalid options, and
  /// `std::runtime_error` for `cpu_offload` with a model that is not offloaded.
  ShardedOptimizerV2(AnyShardedModelV2& model, torch::optim::Optimizer& optimizer,
                     const ShardedOptimizerV2Options& options = {});
  ~ShardedOptimizerV2();

  /// Multiplies the loss by the scale, and runs backward as the model's `backward` does.
  void backward(const at::Tensor& loss);
  void backward_by_grad(const at::Tensor& tensor, const at::Tensor& grad);

  /// Unscales the gradients and updates the parameters. If a gradient is not finite on any rank,
  /// all ranks warn, clear all gradients, change no parameter, and return false.
  bool step();

  /// Unscales the gradients, then scales them so that their norm is at most `max_norm`, or, if that
  /// is 0, leaves them; returns the norm before. Throws with `mp_process_group`, unless `max_norm`
  /// is 0: it is unknown which parameters its ranks share.
  double clip_grad_norm(double max_norm, double norm_type = 2.0);
  double clip_grad_norm(const AnyShardedModelV2& model, double max_norm, double norm_type = 2.0);

  /// Clears the gradients of the optimizer's parameters. Not collective; all ranks must call it.
  void zero_grad();

  /// Returns the full state on every rank; `load_state_dict` accepts it on any number of ranks.
  /// Includes the master weights, so that a run resumes bit-identically from this state and the
  /// model's, whichever is loaded first; see `load_full_state_dict()`.
  ShardedOptimizerV2State state_dict();
  /// Warns if `state` has no scaler state; the scaler is then unchanged.
  void load_state_dict(const ShardedOptimizerV2State& state);

  /// Gives the parameters and the full state back to the optimizer that this object was made for;
  /// afterwards this object must not be used. See `ShardedOptimizer::unwrap()`.
  void unwrap();

  double loss_scale() const;  ///< not collective
  /// Bytes of master weights and optimizer state on CUDA devices and on the CPU. Not collective.
  std::pair<int64_t, int64_t> get_memory_usage() const;

  torch::optim::Optimizer& inner() const;
  ShardedOptimizer& sharded();  ///< Tessera's own optimizer, for example for checkpoints

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::colossalai
