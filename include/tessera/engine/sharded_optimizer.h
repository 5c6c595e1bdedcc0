#pragma once

#include <tessera/engine/fully_shard.h>
#include <tessera/export.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera {

struct ShardedOptimizerOptions {
  /// Steps with LibTorch's fused kernels if the optimizer is exactly `AdamW`, `Adam`, `SGD` or
  /// `Adagrad`. The results agree with the plain step to rounding.
  bool fused = true;

  /// Maximum norm to which the gradients are clipped at the beginning of each step; 0: no clipping.
  double max_grad_norm = 0;
  ClipOptions clip = {};  ///< how to clip; refused without `max_grad_norm`

  /// Declares that the optimizer's step treats each element of a parameter by itself, so that it
  /// gives the same numbers on 1-D parts of parameters. Needed, unless parameters are whole, for
  /// classes other than Adagrad, Adam, AdamW, CPUAdam, RMSprop, SGD and those that
  /// `register_optimizer()` describes as such, also for classes derived from them.
  bool elementwise = false;
};

/// Steps the user's own optimizer on this rank's shards.
///
/// Changes the optimizer's param groups in place: replaces each parameter by the 1-D part of it
/// that lies in this rank's shard (empty if none does). Options, schedulers and state of the
/// optimizer keep working; `optimizer` must outlive this object. Parameters of the model that are
/// added to param groups later, say by `inner().add_param_group()` to unfreeze layers, are replaced
/// by the next step, checkpoint or full state; all ranks must add the same ones.
///
/// An optimizer that is elementwise (see `ShardedOptimizerOptions::elementwise`) steps parts of
/// parameters. Others step whole parameters (`ShardPlan::cuts`, `Partition::kWholeParam`), each on
/// one rank, and must treat each parameter by itself; `LBFGS` does not, and is refused. With
/// `Offload` optimizers must be of a class whose state can be read: Adagrad, Adam, AdamW, CPUAdam,
/// Muon, RMSprop, SGD, one that `register_optimizer()` describes, or one derived from them.
class TESSERA_API ShardedOptimizer {
 public:
  /// Throws `c10::ValueError`, and changes nothing, if a parameter does not belong to the model or
  /// is in two param groups, or for invalid options, and `c10::NotImplementedError` for LBFGS and,
  /// where parameters are cut, for an optimizer that is not known to be elementwise.
  ShardedOptimizer(const ShardedModule& module, torch::optim::Optimizer& optimizer,
                   const ShardedOptimizerOptions& options = {});
  ~ShardedOptimizer();
  ShardedOptimizer(ShardedOptimizer&&) noexcept;
  ShardedOptimizer& operator=(ShardedOptimizer&&) noexcept;

  /// Waits for the reductions, updates this rank's shards, and starts gathering the units that stay
  /// whole.
  ///
  /// Collective. A parameter that no rank used since `zero_grad()` is not changed, as in one
  /// process. Throws if there was no backward since the last `zero_grad()`. If state is offloaded,
  /// units are stepped one after another, so that little of the state is in memory at a time. With
  /// `ShardPlan::outer`, every `outer->every`-th step averages the replicas at its end.
  void step();

  /// Evaluates `closure` first, as `torch::optim::Optimizer::step(closure)`, and returns its loss.
  at::Tensor step(const std::function<at::Tensor()>& closure);

  /// Clears the gradients of the parameters in the optimizer's param groups, as the optimizer's own
  /// `zero_grad()` does; the module's clears all. Not `set_to_none`: turns those that exist into
  /// zeros; the next backward reduces these with its own. Not collective; all ranks must call it.
  void zero_grad(bool set_to_none = true);

  /// Undoes the constructor: the user's optimizer has the module's parameters again and, on every
  /// rank, its full state, as `full_state_dict()` returns it, without master weights. Afterwards
  /// this object throws. Call it before `ShardedModule::unwrap()`, without which the optimizer has
  /// nothing to step with.
  ///
  /// Collective. **Throws** on every rank, and changes nothing, if `full_state_dict()` would throw.
  void unwrap();

  /// See `ShardedModule::clip_grad_norm_`.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  double clip_grad_norm_(double max_norm, const ClipOptions& options);

  /// Moves offloaded units back to the parameters' device permanently: their master weights, and
  /// the optimizer's state for them, including state that it has not made yet. In the order of the
  /// step, moves each unit that still fits into `nbytes`. Returns the bytes moved; `memory()` then
  /// counts them as `master_weights` and `optimizer_state`. Steps stay bit-identical. Units that
  /// have parameters of another optimizer are not moved.
  ///
  /// Not collective: ranks may pass different numbers. Waits for gathers in progress. Space that
  /// was taken in `ShardPlan::offload_directory` is not released. Throws if nothing is offloaded.
  int64_t keep_on_device(int64_t nbytes);

  /// Returns the number of steps taken, including those before a checkpoint that was loaded.
  int64_t steps() const;
  void set_steps(int64_t steps);

  /// With `ShardPlan::outer`: the number of steps since replicas were averaged. 0 right after an
  /// average, when they are equal, and without `outer`.
  int64_t steps_since_average() const;

  /// Returns the user's optimizer.
  torch::optim::Optimizer& inner() const;
  /// Converts to it, so that LibTorch's schedulers take this object: `StepLR(optimizer, 10, 0.5)`.
  operator torch::optim::Optimizer&() const { return inner(); }
  ShardedModule module() const;

  /// Returns `ShardedModule::memory()` plus this rank's optimizer state, including the start values
  /// and the momentum of `ShardPlan::outer`.
  ShardMemory memory() const;

 private:
  friend class OptimizerAccess;  // internal
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
