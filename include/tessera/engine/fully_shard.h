#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/forward_scope.h>
#include <tessera/engine/refused_calls.h>
#include <tessera/engine/shard_plan.h>
#include <tessera/export.h>
#include <tessera/tensor/nested_tensors.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::jit {
struct Module;
}

namespace tessera {

class ShardedState;

/// A tensor of a model with its fully qualified name.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// Bytes that this rank keeps for a sharded model between steps, by kind.
struct ShardMemory {
  int64_t parameters = 0;       ///< shards, and units that stay unsharded
  int64_t gradients = 0;        ///< reduced gradients
  int64_t optimizer_state = 0;  ///< filled in by `ShardedOptimizer::memory()`
  int64_t master_weights = 0;   ///< copies in a wider dtype that the optimizer updates
  int64_t offloaded = 0;        ///< offloaded master weights and optimizer state
  /// Peak of the bytes of gathered parameters. Each rank counts whole units, even where the ranks
  /// of a host share one copy of them.
  int64_t peak_unsharded = 0;
  int64_t peak_in_flight = 0;  ///< peak of the bytes of whole gradients that await reduction
};

/// How gradients are clipped.
struct ClipOptions {
  double norm_type = 2.0;  ///< 1, 2, another positive number or infinity
  /// Gradients are multiplied by `min(1, max_norm / (norm + epsilon))`.
  double epsilon = 1e-6;
  /// Names of parameters to leave out: neither counted nor scaled.
  std::vector<std::string> exclude = {};

  bool operator==(const ClipOptions&) const = default;
};

/// A model that Tessera has sharded.
///
/// The module itself was changed in place: its parameters are gathered when an operator uses them,
/// and their gradients are reduced as backward produces them. So the module can be called directly,
/// and this handle only adds functions that the module lacks. Copies share one state.
///
/// Every backward is collective: if ranks have made different numbers of steps before it, it throws
/// `c10::Error` on all of them, with the ranks that are behind. At `ShardLevel::kParameters`, the
/// default, so is every forward, evaluation included: all ranks must run it equally often, each on
/// its own data. (Where all ranks share the memory of one host, a rank may evaluate alone; a
/// warning says that elsewhere it would wait for the others until the timeout.)
class TESSERA_API ShardedModule {
 public:
  explicit ShardedModule(std::shared_ptr<ShardedState> state);

  /// While it lives, backward keeps whole local gradients and sends nothing; the next backward
  /// after it reduces their sum. Guards nest, and also end correctly when an exception is thrown.
  class TESSERA_API NoSync {
   public:
    explicit NoSync(std::shared_ptr<ShardedState> state);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<ShardedState> state_;
  };
  [[nodiscard]] NoSync no_sync();

  /// While it lives, all parameters stay unsharded, for example to sample from a model or to
  /// evaluate it often. Collective: all ranks must make and destroy it at the same point. The
  /// constructor gathers the parameters; the destructor waits for no other rank.
  class TESSERA_API KeepUnsharded {
   public:
    explicit KeepUnsharded(std::shared_ptr<ShardedState> state);
    ~KeepUnsharded();
    KeepUnsharded(const KeepUnsharded&) = delete;
    KeepUnsharded& operator=(const KeepUnsharded&) = delete;

   private:
    std::shared_ptr<ShardedState> state_;
  };
  [[nodiscard]] KeepUnsharded keep_unsharded();

  /// Sets `ShardPlan::resident_bytes` anew, from the next optimizer step on. Not collective, but
  /// all ranks must call it with the same number. Throws `c10::ValueError` for a number below -1,
  /// and if `ShardPlan::memory_budget` chooses it.
  void set_resident_bytes(int64_t nbytes);

  /// Synchronizes the buffers if the plan says so, but not under `no_sync()`. The wrapper calls
  /// this before each forward. With gradients enabled, the forward is counted, and the end of the
  /// next backward warns if ranks have made different numbers.
  void begin_forward();

  /// Says that the caller's code runs again. The wrapper calls this after a forward that returns.
  void end_forward();

  /// Copies rank 0's buffers to all ranks. Collective. If not `blocking`, the values may arrive as
  /// late as the next forward through the wrapper begins, or this is called again.
  void sync_buffers(bool blocking = true);

  /// Leaves the buffers with these names out of checkpoints; a load neither needs nor refuses
  /// them. Not collective, but all ranks must give the same names. Throws `c10::ValueError` for a
  /// name that no buffer has.
  void leave_out_of_checkpoints(const std::set<std::string>& buffers);

  /// Reduces the gradients that were accumulated under `no_sync()`, as the next backward outside of
  /// it would. Collective. Throws on every rank if no rank has any.
  void reduce();

  /// Returns a copy of a parameter's whole value, in the dtype in which the optimizer updates it:
  /// that of its master copy, if it has one. Collective.
  at::Tensor full_value(const at::Tensor& parameter);

  /// Returns the whole of a tensor that has a value for each element of a parameter, such as one of
  /// the optimizer's state, from the ranks' parts: this rank's, of the elements that it updates, in
  /// any shape and in the order of memory; without elements on a rank that has none. All parts
  /// have one dtype. Throws `c10::ValueError` for another number of elements. Collective.
  at::Tensor gather(const at::Tensor& parameter, const at::Tensor& part);
  /// Returns a copy of this rank's part of such a tensor, of the parameter's shape, in one
  /// dimension, or with the parameter's shape under `Partition::kWholeParam`; without elements if
  /// all of it lies on other ranks. Not collective (but for a DistTensor, over its mesh).
  at::Tensor cut(const at::Tensor& parameter, const at::Tensor& whole);

  /// Returns a parameter's whole reduced gradient; undefined if it has none. Zeros after
  /// `zero_grad(false)` are one. Collective.
  at::Tensor full_grad(const at::Tensor& parameter);
  at::Tensor full_grad(const std::string& name);

  /// Sets a parameter's reduced gradient from a whole one, of the parameter's shape and equal on
  /// all ranks; each rank keeps its part. Throws `c10::Error` if the parameter has no reduced
  /// gradient, and `c10::ValueError` for another shape. Not collective (but for a DistTensor, over
  /// its mesh); all ranks must call it.
  void set_full_grad(const at::Tensor& parameter, const at::Tensor& value);

  /// Returns this rank's part of a parameter's reduced gradient, to be read or changed: the
  /// elements that this rank updates, in one dimension, or with the parameter's shape under
  /// `Partition::kWholeParam`. Undefined if it has none, or if all of it lies on other ranks. Waits
  /// for reductions in progress. Not collective.
  at::Tensor local_grad(const at::Tensor& parameter);
  at::Tensor local_grad(const std::string& name);

  /// Returns true if a parameter has a gradient, reduced or kept under `no_sync()`. Waits for
  /// reductions in progress. Not collective.
  bool has_grad(const at::Tensor& parameter);
  /// Returns true if a parameter has a reduced gradient. Waits for reductions in progress. Not
  /// collective.
  bool has_reduced_grad(const at::Tensor& parameter);

  /// Returns the dtype in which a parameter's reduced gradient is kept: that of its master copy.
  at::ScalarType grad_dtype(const at::Tensor& parameter);

  /// Returns true if `value` is true on any of the model's ranks. Collective.
  bool any_rank(bool value);

  /// Clears all gradients. If not `set_to_none`, they become zeros, and the optimizer steps
  /// parameters that the next backward does not use with zero gradients. Not collective, but all
  /// ranks must call it.
  void zero_grad(bool set_to_none = true);
  /// Does the same for one parameter.
  void zero_grad(const at::Tensor& parameter, bool set_to_none = true);

  /// Scales the reduced gradients so that their total norm is at most `max_norm`, and returns the
  /// norm before. Collective. `norm_type`: 1, 2, another positive number or infinity. The formula
  /// is that of `torch::nn::utils::clip_grad_norm_`: gradients times
  /// `min(1, max_norm / (norm + 1e-6))`.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0) {
    return clip_grad_norm_(max_norm, ClipOptions{.norm_type = norm_type});
  }
  /// Throws `c10::ValueError` if `options.exclude` has a name that the model does not have.
  double clip_grad_norm_(double max_norm, const ClipOptions& options);

  /// Returns copies of all parameters and buffers under their names, in the order of registration,
  /// on every rank. Collective. Takes the memory of the whole model.
  std::vector<NamedTensor> full_state();

  /// Sets all parameters and buffers from values, such as those that `full_state()` returned, here
  /// or in another model. Those of parameters must be equal on all ranks; buffers may be each
  /// rank's own. Collective. Throws `c10::ValueError` on every rank, and changes nothing, if names
  /// or shapes differ from the model's, or values of parameters between ranks. If not `strict`,
  /// missing entries keep their values, and unknown names are ignored.
  void load_full_state(const std::vector<NamedTensor>& state, bool strict = true);

  /// Undoes the sharding: the module's parameters become ordinary tensors with memory of their own,
  /// in the dtype in which they were used and with the values that `full_state()` returns, and lose
  /// Tessera's hooks. Buffers are not changed; gradients and master weights are dropped. The module
  /// may be sharded again. Afterwards, all handles of the sharded model throw.
  ///
  /// Collective. **Memory**: that of the whole model; shards are freed unit by unit.
  /// **Throws** on every rank, and changes nothing, under `no_sync()`, `keep_unsharded()` and
  /// `join()`, and while a `ShardedOptimizer` for the model exists: call its `unwrap()` first, or
  /// destroy it.
  void unwrap();

  ShardMemory memory() const;

  /// Returns a table of the units: names, elements, this rank's shard, level; under each, where its
  /// parameters may be cut, unless anywhere, and the owners of whole ones.
  std::string describe() const;

  /// Throws if the model was unwrapped.
  const std::shared_ptr<ShardedState>& state() const;

 protected:
  bool casts_inputs() const;
  /// Returns a floating tensor in the plan's `param_dtype`, and other tensors as they are.
  at::Tensor cast_tensor(const at::Tensor& input) const;
  /// Casts an input, also tensors in optionals, vectors, arrays, tuples, pairs and maps.
  template <class T>
  decltype(auto) cast_input(T&& input) const {
    if constexpr (detail::NestedTensors<std::remove_cvref_t<T>>) {
      std::remove_cvref_t<T> converted(std::forward<T>(input));
      detail::replace_tensors(converted,
                              [this](const at::Tensor& tensor) { return cast_tensor(tensor); });
      return converted;
    } else {
      return std::forward<T>(input);
    }
  }
  [[noreturn]] static void refuse_to_cast();

  std::shared_ptr<ShardedState> state_;
};

/// A sharded model that also gives access to the module: `sharded->layer`, `sharded.forward(x)`.
template <class M>
class Sharded : public ShardedModule {
 public:
  Sharded(std::shared_ptr<M> module, std::shared_ptr<ShardedState> state)
      : ShardedModule(std::move(state)), module_(std::move(module)) {}

  M* operator->() const { return module_.get(); }
  M& operator*() const { return *module_; }
  const std::shared_ptr<M>& ptr() const { return module_; }

  /// Calls the module's own `forward`, after the preparations that the plan asks for: synchronizes
  /// buffers, and converts floating tensors to `precision.param_dtype`.
  template <class... Args>
  decltype(auto) forward(Args&&... args) {
    const detail::ForwardScope<ShardedModule> scope(*this);
    if (!casts_inputs()) return module_->forward(std::forward<Args>(args)...);
    if constexpr (requires { module_->forward(cast_input(std::forward<Args>(args))...); }) {
      return module_->forward(cast_input(std::forward<Args>(args))...);
    } else {
      refuse_to_cast();
    }
  }
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

 private:
  std::shared_ptr<M> module_;
};

namespace detail {
TESSERA_API std::shared_ptr<ShardedState> shard(torch::nn::Module& module, const ShardPlan& plan);
TESSERA_API std::shared_ptr<ShardedState> shard(torch::jit::Module& module, const ShardPlan& plan);

// A `torch::nn::ModuleHolder` (a class made by TORCH_MODULE) stands for the module that it holds.
template <class T>
concept ModuleHolder = requires(const T& holder) {
  typename T::ContainedType;
  holder.ptr();
};

// The pointer to a module, from itself or from the module's holder.
template <class M>
std::shared_ptr<M> pointer_to(const std::shared_ptr<M>& module) {
  return module;
}
template <ModuleHolder Holder>
auto pointer_to(const Holder& holder) {
  return holder.ptr();
}

// The module's class, for that class or for its holder.
template <class M>
struct ContainedModule {
  using type = M;
};
template <ModuleHolder M>
struct ContainedModule<M> {
  using type = typename M::ContainedType;
};
}  // namespace detail

/// Shards the parameters of `module` over the ranks of `plan.process_group`, in place.
///
/// Collective: all ranks call it with models of the same structure. The module's code, its members
/// and the optimizer classes need no change; pass the optimizer to `ShardedOptimizer` afterwards.
///
/// **Memory**: at `kParameters` each rank keeps 1/N of the parameters, and gathers units of
/// `plan.unit_bytes` while they are in use.
/// **Throws** `c10::ValueError` on every rank, and changes nothing, for a model without parameters,
/// a module that is sharded already, or models that differ between ranks (the message names the
/// first differing parameter and the ranks).
///
/// A parameter shared by several modules is detected, and sharded once.
template <class M>
Sharded<M> fully_shard(std::shared_ptr<M> module, const ShardPlan& plan = {}) {
  auto state = detail::shard(*module, plan);
  return Sharded<M>(std::move(module), std::move(state));
}
template <detail::ModuleHolder Holder>
auto fully_shard(const Holder& holder, const ShardPlan& plan = {}) {
  return fully_shard(holder.ptr(), plan);
}
/// Shards a scripted module. That is itself a handle.
TESSERA_API ShardedModule fully_shard(torch::jit::Module& module, const ShardPlan& plan = {});
/// Shards tensors by name, whatever holds them: a module of another language, say. A tensor may
/// have several names. The tensors themselves are changed; keep them to train them.
TESSERA_API ShardedModule fully_shard(std::vector<NamedTensor> parameters,
                                      std::vector<NamedTensor> buffers, const ShardPlan& plan = {});

/// Returns true for a parameter of a sharded model.
TESSERA_API bool is_sharded(const at::Tensor& parameter);

/// Returns true if reading `.grad` of `parameter` would throw, as gradients of a sharded model lie
/// elsewhere: not in a hook that autograd calls for the parameter, and not after the model was
/// destroyed.
TESSERA_API bool keeps_grad_elsewhere(const at::Tensor& parameter);

}  // namespace tessera
