#pragma once

#include <tessera/engine/fully_shard.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/engine/optimizer_state_dict.h>
#include <tessera/engine/sharded_optimizer.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

/// FairScale's sharded data parallel training. See `dialects/fairscale/README.md`.
namespace tessera::fairscale {

struct OssOptions {
  /// The ranks that share the optimizer's work and state; null: the default process group.
  ProcessGroupPtr group;
  /// Sends updated parameters as fp16. All ranks use these; owners keep and update fp32 values.
  bool broadcast_fp16 = false;
};

namespace detail {
struct OssImpl;
struct Sharding;
}  // namespace detail

/// The part of `OSS` that does not depend on the class of the wrapped optimizer.
///
/// To schedulers, and to code that takes any `torch::optim::Optimizer`, it is an optimizer with all
/// of the parameters: learning rates are changed in its `param_groups()` and apply to the next
/// step, and its `zero_grad()` clears all gradients. Each rank owns some of the parameters, whole,
/// and has optimizer state for those only.
///
/// By itself it steps with the gradients in `.grad`, and the training program must make these equal
/// on all ranks; a `ShardedDataParallel` that it is given to provides the reduced gradients. All
/// members are collective unless they say otherwise.
///
/// **Destruction**: when the last of the optimizer and the objects that share a
/// `ShardedDataParallel` with it is destroyed, the parameters become ordinary tensors again, with
/// the values that all ranks use. That sends nothing, and waits for the collectives that the last
/// step has started. If operators have written to parameters that were not used since, and during
/// stack unwinding, the parameters stay sharded until the next `OSS` or wrapper takes them over.
class TESSERA_API AnyOss : public torch::optim::Optimizer {
 public:
  ~AnyOss() override;

  /// Updates the parameters that this rank owns and sends them to the others. With a closure,
  /// evaluates it first and returns its loss; otherwise returns an undefined tensor.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Adds a group; its parameters go to the ranks that own least so far. Parameters that are owned
  /// already keep their owner and their state. Drops gradients that `ShardedDataParallel` has
  /// reduced. Throws on every rank, and adds nothing, if a parameter belongs to another optimizer.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Scales the gradients so that their norm, over all parameters of this optimizer for which
  /// `filter_params_fn` returns true (null: all), is at most `max_norm`. Returns the norm before.
  /// `norm_type`: 1, 2, another positive number or infinity.
  double clip_grad_norm(double max_norm, double norm_type = 2.0,
                        const std::function<bool(const at::Tensor&)>& filter_params_fn = nullptr);

  /// Gathers the state of all ranks on `recipient_rank` of the group (-1: on all), on the CPU. With
  /// `broadcast_fp16`, includes the unrounded values of the owners; see `full_state_dict()`.
  void consolidate_state_dict(int recipient_rank = 0);

  /// Returns the state that was consolidated on this rank, as the plain optimizer would have it.
  /// Not collective; throws if there is none, or if it is older than the last step. `all_ranks`:
  /// consolidates on all ranks first. That is collective.
  OptimizerStateDict state_dict(bool all_ranks = false);

  /// Loads a full state, from any world size or from the plain optimizer, the same on every rank.
  void load_state_dict(const OptimizerStateDict& state);

  /// Save and load like the plain optimizer: `torch::save(optimizer, file)` writes the consolidated
  /// state, and `torch::load` of either reads the other's files. Saving is not collective.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// Returns the parameters that each rank owns. Not collective.
  std::vector<std::vector<at::Tensor>> partition_parameters() const;

  /// Returns the reduced gradient of a parameter on its owner, to be read or changed; undefined on
  /// other ranks, and if there is none.
  at::Tensor gradient(const at::Tensor& param);

  /// Returns the bytes that this rank keeps. Not collective.
  ShardMemory memory() const;

  /// Makes the parameters of an `OSS` by itself ordinary tensors with memory of their own and the
  /// values that all ranks use: with `broadcast_fp16`, the rounded ones. Its next collective call
  /// takes them over again; its state is kept. Throws for one that serves a `ShardedDataParallel`:
  /// that has an `unwrap()` of its own.
  void unwrap();

  /// Calls `use` with the underlying `ShardedOptimizer`. During the call that has the options of
  /// `param_groups()`. For checkpoints that gather nothing, of a model in a `ShardedDataParallel`:
  ///
  ///     optimizer.with_sharded([&](tessera::ShardedOptimizer& sharded) {
  ///       tessera::save_checkpoint(path, model.sharded(), &sharded);
  ///     });
  void with_sharded(const std::function<void(ShardedOptimizer&)>& use);

 protected:
  /// `inner` was made with all parameters, and has no state that differs between ranks.
  AnyOss(std::unique_ptr<torch::optim::Optimizer> inner, const OssOptions& options);

 private:
  friend class AnyShardedDataParallel;
  friend class ShardedGradScaler;
  std::unique_ptr<detail::OssImpl> impl_;
};

/// Shards the work and the state of an optimizer: any of LibTorch's but LBFGS, or a class of yours
/// that derives from `torch::optim::Optimizer`.
///
///     OSS<torch::optim::AdamW> optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
///
/// Collective. Throws `c10::ValueError` if there are no parameters.
template <class Wrapped>
class OSS final : public AnyOss {
 public:
  template <class Options>
  OSS(std::vector<at::Tensor> params, Options options, const OssOptions& oss = {})
      : AnyOss(std::make_unique<Wrapped>(std::move(params), std::move(options)), oss) {}
  template <class Options>
  OSS(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Options options,
      const OssOptions& oss = {})
      : AnyOss(std::make_unique<Wrapped>(param_groups, std::move(options)), oss) {}
};

struct ShardedDataParallelOptions {
  /// Must be the group of the optimizers; null stands for it.
  ProcessGroupPtr process_group;
  /// Takes rank 0's buffers at the beginning of every forward, but not under `no_sync()`.
  bool broadcast_buffers = true;
  /// Takes rank 0's parameters and buffers at construction.
  bool sync_models_at_startup = true;
  /// Gradients are reduced in buckets of about this many elements (not bytes); 0: one reduction per
  /// parameter. None (in FairScale, 2^23): see `ShardPlan::unit_bytes`.
  std::optional<int64_t> reduce_buffer_size = std::nullopt;
  /// Warns at a forward if parameters were frozen or unfrozen. That works without this check, too.
  bool auto_refresh_trainable = true;
  /// Gradients are sent as fp16, with buckets or without.
  bool reduce_fp16 = false;
  /// Warns when `auto_refresh_trainable` has found a change.
  bool warn_on_trainable_params_changed = true;
};

/// The part of `ShardedDataParallel` that does not depend on the class of the wrapped module. All
/// members are collective unless they say otherwise.
class TESSERA_API AnyShardedDataParallel {
 public:
  AnyShardedDataParallel(const AnyShardedDataParallel&) = delete;
  AnyShardedDataParallel& operator=(const AnyShardedDataParallel&) = delete;

  /// While the guard lives, backward sends nothing; the next backward after it reduces the sum of
  /// all gradients. The guard also ends correctly when an exception is thrown. Not collective.
  [[nodiscard]] ShardedModule::NoSync no_sync() { return sharded().no_sync(); }
  /// Reduces the gradients that were accumulated under `no_sync()`, if no other backward is to
  /// follow. Throws on every rank if no rank has any.
  void reduce() { sharded().reduce(); }
  /// Takes rank 0's buffers. If not `blocking`, they may arrive as late as the next forward begins.
  void sync_buffers(bool blocking = false) { sharded().sync_buffers(blocking); }
  /// Checks that all ranks train the same parameters, and warns if gradients wait to be reduced.
  void refresh_trainable();
  /// Runs `train`, in which ranks may take different numbers of steps. See `tessera::join`.
  void join(const std::function<void()>& train);
  /// Sets all gradients to zero: the optimizer steps parameters that the next backward does not use
  /// with zero gradients, and `full_grad()` then returns zeros for them. `set_to_none`: clears the
  /// gradients, as every other way of clearing does (the module's, the optimizers'). Not
  /// collective; all ranks must call it.
  void zero_grad(bool set_to_none = false);
  /// Returns a parameter's gradient, averaged over ranks, on every rank; undefined if it has none.
  at::Tensor full_grad(const at::Tensor& param) { return sharded().full_grad(param); }

  /// Switch the module's mode. Not collective.
  void train(bool on = true);
  void eval() { train(false); }
  bool training() const;  ///< the module's mode

  /// Makes the module's parameters ordinary tensors with memory of their own and the values that
  /// all ranks use, without hooks. Afterwards the module is an ordinary one, and this object must
  /// not be used. Its optimizers keep their state, and step by themselves from then on, or serve
  /// another wrapper. Gradients are dropped. Throws on every rank, and changes nothing, under
  /// `no_sync()` and `join()`.
  void unwrap();

  c10::DeviceType device_type() const;                   ///< of all parameters
  bool is_multi_device_module() const { return false; }  ///< one device for each rank
  /// Returns Tessera's own handle, valid until the model is converted or a group is added.
  ShardedModule sharded() const;

 protected:
  AnyShardedDataParallel(std::shared_ptr<torch::nn::Module> module,
                         const std::vector<AnyOss*>& optimizers,
                         const ShardedDataParallelOptions& options);
  ~AnyShardedDataParallel();
  void begin_forward();
  void end_forward();
  void convert(std::optional<at::Device> device, std::optional<at::ScalarType> dtype,
               bool non_blocking);

 private:
  void check(const std::vector<AnyOss*>& optimizers) const;

  std::shared_ptr<torch::nn::Module> module_;
  ShardedDataParallelOptions options_;
  std::shared_ptr<detail::Sharding> sharding_;
  std::vector<bool> trainable_;
};

/// Data parallel training of `Net` (a module's class, or the holder that TORCH_MODULE makes) with
/// optimizers that are `OSS`: the gradients of each parameter are averaged on the rank that owns
/// it.
///
///     OSS<torch::optim::SGD> optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
///     ShardedDataParallel<Net> model(net, optimizer);
///     model.forward(x).backward();
///     optimizer.step();
///
/// Parameters that no optimizer has are not reduced. Any number of forwards and backwards may
/// precede a step, in any order. Throws `c10::ValueError` on every rank, and changes nothing, if an
/// optimizer has a parameter that does not belong to the module, or two have the same parameter.
template <class Net>
class ShardedDataParallel final : public AnyShardedDataParallel {
 public:
  using Module = typename tessera::detail::ContainedModule<Net>::type;

  /// `module`: a pointer to it, or its holder.
  template <class ModulePtr>
  ShardedDataParallel(const ModulePtr& module, const std::vector<AnyOss*>& optimizers,
                      const ShardedDataParallelOptions& options = {})
      : AnyShardedDataParallel(tessera::detail::pointer_to(module), optimizers, options),
        net_(tessera::detail::pointer_to(module)) {}
  template <class ModulePtr>
  ShardedDataParallel(const ModulePtr& module, AnyOss& optimizer,
                      const ShardedDataParallelOptions& options = {})
      : ShardedDataParallel(module, std::vector<AnyOss*>{&optimizer}, options) {}

  /// Calls the module's own `forward`, with any arguments that it takes.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    const tessera::detail::ForwardScope<ShardedDataParallel> scope(*this);
    return net_->forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// The module's own members.
  Module* operator->() const { return net_.get(); }
  Module& module() const { return *net_; }

  /// Converts floating parameters and buffers, and keeps the optimizers' state. The device type
  /// can't change. Gradients are dropped. `non_blocking`: as in `torch::nn::Module::to`.
  ShardedDataParallel& to(at::ScalarType dtype, bool non_blocking = false) {
    return to(std::nullopt, dtype, non_blocking);
  }
  ShardedDataParallel& to(at::Device device, bool non_blocking = false) {
    return to(device, std::nullopt, non_blocking);
  }
  ShardedDataParallel& to(std::optional<at::Device> device, std::optional<at::ScalarType> dtype,
                          bool non_blocking = false) {
    convert(device, dtype, non_blocking);
    return *this;
  }

 private:
  friend class tessera::detail::ForwardScope<ShardedDataParallel>;

  std::shared_ptr<Module> net_;
};

/// `GradScaler` for `OSS`: a step is skipped on all ranks of the optimizer's group or on none.
/// Works on the CPU as on a GPU. See `GradScaler` for defaults, the order of calls, and errors.
class TESSERA_API ShardedGradScaler : public GradScaler {
 public:
  using GradScaler::GradScaler;
  using GradScaler::scale;
  using GradScaler::step;
  using GradScaler::unscale_;

  /// Collective over the optimizer's group.
  void unscale_(AnyOss& optimizer);
  /// Returns whether it stepped.
  bool step(AnyOss& optimizer);
  /// Throws `std::runtime_error` if enabled: closures can't be used with a scaler.
  bool step(AnyOss& optimizer, const std::function<at::Tensor()>& closure);
};

}  // namespace tessera::fairscale
