#pragma once

#include <tessera/export.h>
#include <tessera/fully_shard.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera {

struct ShardedOptimizerOptions {
  /// Step with LibTorch's fused kernels where the optimizer is exactly `AdamW`, `Adam`, `SGD` or
  /// `Adagrad`. The results agree with the plain step to rounding.
  bool fused = true;

  /// Clip the gradients to this norm at the beginning of each step; 0: do not.
  double max_grad_norm = 0;
  ClipOptions clip = {};  ///< how; refused without `max_grad_norm`
};

class ShardedOptimizer;
struct Segment;
const std::vector<Segment>& segments_of(const ShardedOptimizer& optimizer);          // internal
void offload_state(ShardedOptimizer& optimizer);                                     // internal
void give_back_optimizer(ShardedOptimizer& optimizer);                               // internal
void set_master_digits(ShardedOptimizer& optimizer, std::vector<at::Tensor> parts);  // internal

/// Steps the user's own optimizer on this rank's shards.
///
/// The optimizer's param groups are changed in place: each parameter is replaced by the 1-D part of
/// it that lies in this rank's shard (none, if it lies elsewhere). Options, schedulers and state of
/// the optimizer keep working; `optimizer` must outlive this object. Parameters of the model that
/// are put into param groups later, say by `inner().add_param_group()` to thaw layers, are taken
/// over by the next step, checkpoint or full state; all ranks must do it alike. Optimizers must be
/// elementwise; `LBFGS` is refused. With `Offload` they must be of a class whose state can be read:
/// Adagrad, Adam, AdamW, CPUAdam, RMSprop, SGD, or one derived from them.
class TESSERA_API ShardedOptimizer {
 public:
  /// Throws `c10::ValueError`, and changes nothing, if a parameter is not the model's or is in two
  /// param groups, or for options that don't fit, and `c10::NotImplementedError` for LBFGS on flat
  /// shards.
  ShardedOptimizer(const ShardedModule& module, torch::optim::Optimizer& optimizer,
                   const ShardedOptimizerOptions& options = {});
  ~ShardedOptimizer();
  ShardedOptimizer(ShardedOptimizer&&) noexcept;
  ShardedOptimizer& operator=(ShardedOptimizer&&) noexcept;

  /// Waits for the reductions, updates this rank's shards, and starts gathering what stays whole.
  ///
  /// Collective. A parameter that no rank used since `zero_grad()` is left alone, as in one
  /// process. Throws if there was no backward since the last `zero_grad()`. Where state is
  /// offloaded, one unit is stepped after the other, so that little of it is in memory at a time.
  void step();

  /// As `torch::optim::Optimizer::step(closure)`: evaluates `closure` first and returns its loss.
  at::Tensor step(const std::function<at::Tensor()>& closure);

  /// Forgets all gradients. (The optimizer's and the module's own `zero_grad()` do the same.)
  void zero_grad();

  /// Undoes the constructor: the user's optimizer has the module's parameters again and, on every
  /// rank, all of its state, as `full_state_dict()` gives it without master weights. This is of no
  /// use then, and throws. To be called before `ShardedModule::unwrap()`, without which the
  /// optimizer has nothing to step with.
  ///
  /// Collective. **Throws** on every rank, and changes nothing, as `full_state_dict()` does.
  void unwrap();

  /// See `ShardedModule::clip_grad_norm_`.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  double clip_grad_norm_(double max_norm, const ClipOptions& options);

  /// Of what is offloaded, brings units back to the parameters' device for good: their master
  /// copies, the state that the optimizer has for them, and what it will make. In the order of the
  /// step, each unit that still fits into `nbytes`. Returns the bytes that this takes there, which
  /// `memory()` then counts as `master_weights` and `optimizer_state`. Steps give the same bits.
  /// Units that have parameters of another optimizer stay where they are.
  ///
  /// Not collective: ranks may give different numbers. Waits for gathers that are under way. Room
  /// that was taken in `ShardPlan::offload_directory` stays taken. Throws if nothing is offloaded.
  int64_t keep_on_device(int64_t nbytes);

  /// Steps taken so far, those before a checkpoint that was loaded included.
  int64_t steps() const;
  void set_steps(int64_t steps);

  /// The user's optimizer. Waits until the last step is over; all ranks must have come to it.
  torch::optim::Optimizer& inner() const;
  ShardedModule module() const;

  /// `ShardedModule::memory()` plus this rank's optimizer state.
  ShardMemory memory() const;

 private:
  friend const std::vector<Segment>& segments_of(const ShardedOptimizer& optimizer);
  friend void offload_state(ShardedOptimizer& optimizer);
  friend void give_back_optimizer(ShardedOptimizer& optimizer);
  friend void set_master_digits(ShardedOptimizer& optimizer, std::vector<at::Tensor> parts);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
