#pragma once

#include <tessera/fully_shard.h>
#include <tessera/grad_scaler.h>
#include <tessera/optimizer_state_dict.h>
#include <tessera/sharded_optimizer.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

/// FairScale's sharded data parallel training. See `docs/dialects/fairscale.md`.
namespace tessera::fairscale {

struct OssOptions {
  /// The ranks that share the optimizer's work and state; null: the default process group.
  ProcessGroupPtr group;
  /// Updated parameters travel as fp16. All ranks use the rounded values; their owner goes on from
  /// its own, which it keeps in fp32.
  bool broadcast_fp16 = false;
};

namespace detail {
struct OssImpl;
struct Sharding;
}  // namespace detail

/// What `OSS` is whatever optimizer it wraps.
///
/// To schedulers, and to code that takes any `torch::optim::Optimizer`, it is an optimizer with all
/// of the parameters: learning rates are changed in its `param_groups()` and hold for the next
/// step, and its `zero_grad()` clears all gradients. Each rank owns some of the parameters, whole,
/// and has optimizer state for those only.
///
/// By itself it steps with the gradients in `.grad`, which whoever trains makes equal on all ranks;
/// given to `ShardedDataParallel` it gets them from there. All members are collective unless they
/// say otherwise.
///
/// **Destruction**: the parameters become ordinary tensors again, with the values that all ranks
/// use, when the last one goes of the optimizer and those that share a `ShardedDataParallel` with
/// it; another `OSS` may then have them. Nothing is sent: the destructor waits for what the last
/// step has started. Where that would not do, because operators have written to parameters that
/// nobody has used since, or an exception is on its way, they stay as they are until the next `OSS`
/// or wrapper takes them over.
class TESSERA_API AnyOss : public torch::optim::Optimizer {
 public:
  ~AnyOss() override;

  /// Updates the parameters that this rank owns and sends them to the others. With a closure,
  /// evaluates it first and returns its loss; undefined otherwise.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Adds a group; its parameters go to the ranks that own least so far. Those that are owned
  /// already stay where they are, with their state. Gradients that `ShardedDataParallel` has
  /// reduced are forgotten. Throws on every rank, and adds nothing, if parameters are another's.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Scales the gradients so that their norm, over all parameters of this optimizer for which
  /// `filter_params_fn` is true (null: all), is at most `max_norm`. Returns the norm before.
  /// `norm_type`: 1, 2, another positive number or infinity.
  double clip_grad_norm(double max_norm, double norm_type = 2.0,
                        const std::function<bool(const at::Tensor&)>& filter_params_fn = nullptr);

  /// Brings the state of all ranks to `recipient_rank` of the group (-1: to all), on the CPU. With
  /// `broadcast_fp16` also the values that owners go on from; see `full_state_dict()`.
  void consolidate_state_dict(int recipient_rank = 0);

  /// What was consolidated on this rank, as the plain optimizer would have it. Not collective;
  /// throws if there is nothing, or if it is older than the last step. `all_ranks`: consolidates on
  /// all ranks first.
  OptimizerStateDict state_dict(bool all_ranks = false);

  /// Takes a whole state, of any world size or of the plain optimizer, the same on every rank.
  void load_state_dict(const OptimizerStateDict& state);

  /// As the plain optimizer: `torch::save(optimizer, file)` writes what was consolidated, and
  /// `torch::load` of either reads what the other wrote. Saving is not collective.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// The parameters that each rank owns. Not collective.
  std::vector<std::vector<at::Tensor>> partition_parameters() const;

  /// The reduced gradient of a parameter on its owner, to look at or to change; undefined on other
  /// ranks, and if there is none.
  at::Tensor gradient(const at::Tensor& param);

  /// Bytes that this rank keeps. Not collective.
  ShardMemory memory() const;

  /// Makes the parameters of an `OSS` by itself ordinary tensors with memory of their own, which
  /// hold what all ranks use: of `broadcast_fp16` what was sent. Its next collective call takes
  /// them over again, and state stays. Throws for one that serves a `ShardedDataParallel`, which
  /// has an `unwrap()` of its own.
  void unwrap();

  /// Calls `use` with the engine's optimizer, which has the options of `param_groups()` meanwhile:
  /// for checkpoints that nothing is gathered for, of what `ShardedDataParallel` has made of it.
  ///
  ///     optimizer.with_sharded([&](tessera::ShardedOptimizer& sharded) {
  ///       tessera::save_checkpoint(path, model.sharded(), &sharded);
  ///     });
  void with_sharded(const std::function<void(ShardedOptimizer&)>& use);

 protected:
  /// `inner` was made with all parameters and has no state that ranks do not share.
  AnyOss(std::unique_ptr<torch::optim::Optimizer> inner, const OssOptions& options);

 private:
  friend class AnyShardedDataParallel;
  friend class ShardedGradScaler;
  std::unique_ptr<detail::OssImpl> impl_;
};

/// Shards the work and the state of an optimizer: any of LibTorch's but LBFGS, or one of yours that
/// derives from `torch::optim::Optimizer`.
///
///     OSS<torch::optim::AdamW> optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
///
/// Collective. Throws `c10::ValueError` without parameters.
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
  /// Null: that of the optimizers, which it must be.
  ProcessGroupPtr process_group;
  /// Take rank 0's buffers at the beginning of every forward, but not under `no_sync()`.
  bool broadcast_buffers = true;
  /// Take rank 0's parameters and buffers at construction.
  bool sync_models_at_startup = true;
  /// Gradients are reduced in buckets of about so many elements (not bytes); 0: each by itself.
  /// None: as suits the transport (see `ShardPlan::unit_bytes`), in place of FairScale's 2^23.
  std::optional<int64_t> reduce_buffer_size = std::nullopt;
  /// Look at each forward whether parameters were frozen or unfrozen, and say so. What is trainable
  /// is right without it, too.
  bool auto_refresh_trainable = true;
  /// Gradients travel as fp16, with buckets or without.
  bool reduce_fp16 = false;
  /// Warn when `auto_refresh_trainable` has found a change.
  bool warn_on_trainable_params_changed = true;
};

/// What `ShardedDataParallel` is whatever module it wraps. All members are collective unless they
/// say otherwise.
class TESSERA_API AnyShardedDataParallel {
 public:
  AnyShardedDataParallel(const AnyShardedDataParallel&) = delete;
  AnyShardedDataParallel& operator=(const AnyShardedDataParallel&) = delete;

  /// While the guard lives, backward sends nothing; the next one after it reduces the sum of all.
  /// Exceptions end it as they should. Not collective.
  [[nodiscard]] ShardedModule::NoSync no_sync();
  /// Reduces what backwards under `no_sync()` have left, where no other backward is to follow.
  /// Throws on every rank if no rank has anything.
  void reduce();
  /// Takes rank 0's buffers. Not `blocking`: at the latest when the next forward begins.
  void sync_buffers(bool blocking = false);
  /// Checks that all ranks train the same parameters, and warns if gradients wait to be reduced.
  void refresh_trainable();
  /// Runs `train`, in which ranks may take different numbers of steps. See `tessera::join`.
  void join(const std::function<void()>& train);
  /// Sets all gradients to zero: parameters that the next backward does not use are then stepped
  /// with gradients of zeros, and `full_grad()` has them after it. `set_to_none`: forgets them, as
  /// every other way of clearing does (the module's, the optimizers'). Not collective; all ranks
  /// must do it.
  void zero_grad(bool set_to_none = false);
  /// The gradient of a parameter, the mean over ranks, on every rank; undefined if it has none.
  at::Tensor full_grad(const at::Tensor& param);

  /// Switch the module's mode. Not collective.
  void train(bool on = true);
  void eval() { train(false); }
  bool training() const;  ///< the module's mode

  /// Makes the module's parameters ordinary tensors with memory of their own, which hold what all
  /// ranks use, without hooks: the module is as any other, and this of no use. Its optimizers step
  /// by themselves from then on, or serve another wrapper, and keep their state. Gradients are
  /// forgotten. Throws on every rank, and changes nothing, under `no_sync()` and `join()`.
  void unwrap();

  c10::DeviceType device_type() const;  ///< of all parameters
  bool is_multi_device_module() const;  ///< always false: one device for each rank
  /// The engine's handle, until the model is converted or a group is added.
  ShardedModule sharded() const;

 protected:
  AnyShardedDataParallel(std::shared_ptr<torch::nn::Module> module,
                         const std::vector<AnyOss*>& optimizers,
                         const ShardedDataParallelOptions& options);
  ~AnyShardedDataParallel();
  void begin_forward();
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
/// Parameters that no optimizer has are not reduced. Any numbers of forwards and backwards may
/// precede a step, in any order. Throws `c10::ValueError` on every rank, and changes nothing, if an
/// optimizer has what is not the module's, or two have the same parameter.
template <class Net>
class ShardedDataParallel final : public AnyShardedDataParallel {
 public:
  using Module = typename tessera::detail::ContainedModule<Net>::type;

  ShardedDataParallel(std::shared_ptr<Module> module, AnyOss& optimizer,
                      const ShardedDataParallelOptions& options = {})
      : ShardedDataParallel(std::move(module), std::vector<AnyOss*>{&optimizer}, options) {}
  ShardedDataParallel(std::shared_ptr<Module> module, const std::vector<AnyOss*>& optimizers,
                      const ShardedDataParallelOptions& options = {})
      : AnyShardedDataParallel(module, optimizers, options), net_(std::move(module)) {}
  template <tessera::detail::ModuleHolder Holder>
  ShardedDataParallel(const Holder& holder, AnyOss& optimizer,
                      const ShardedDataParallelOptions& options = {})
      : ShardedDataParallel(holder.ptr(), optimizer, options) {}
  template <tessera::detail::ModuleHolder Holder>
  ShardedDataParallel(const Holder& holder, const std::vector<AnyOss*>& optimizers,
                      const ShardedDataParallelOptions& options = {})
      : ShardedDataParallel(holder.ptr(), optimizers, options) {}

  /// The module's own `forward`, with whatever arguments it takes.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    begin_forward();
    return net_->forward(std::forward<Args>(args)...);
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  /// The module's own members.
  Module* operator->() const { return net_.get(); }
  Module& module() const { return *net_; }

  /// Converts floating parameters and buffers, and keeps the optimizers' state. The type of device
  /// can't change. Gradients are forgotten. `non_blocking`: as `torch::nn::Module::to` has it.
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
  std::shared_ptr<Module> net_;
};

/// `GradScaler` for `OSS`: a step is skipped on all ranks of the optimizer's group or on none.
/// Works on the CPU as on a GPU. See there for defaults, the order of calls, and errors.
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
