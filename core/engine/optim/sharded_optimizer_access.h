#pragma once

#include <tessera/engine/optimizer_state_dict.h>
#include <tessera/engine/sharded_optimizer.h>

#include <vector>

#include "engine/optim/outer_steps.h"
#include "engine/optim/segments.h"

namespace tessera {

/// What other parts of Tessera reach inside a sharded optimizer.
class OptimizerAccess {
 public:
  explicit OptimizerAccess(const ShardedOptimizer& optimizer) : impl_(*optimizer.impl_) {}

  /// Returns the segments that it steps on, for checkpoints: all of its parameters in order, with
  /// an undefined tensor for those that do not lie in this rank's shard. Adopts parameters that
  /// were put into its param groups.
  const std::vector<Segment>& segments() const;
  /// Returns the averages of replicas; null without `ShardPlan::outer`.
  OuterSteps* outer_steps() const;
  /// Called in place of a step that is skipped because of its gradients: it counts for the averages
  /// of replicas, and may be followed by one. Collective.
  void skip_step() const;
  /// Moves state that was made outside of the optimizer's steps to the offload memory.
  void offload_state() const;
  /// Sets this rank's parts of the master weights in the optimizer's state, one for each segment.
  /// `restore_digits()` applies them until the next step.
  void set_master_digits(std::vector<at::Tensor> parts) const;
  /// Undoes the constructor, if parameters are whole: see `give_back_optimizer()` in segments.h.
  /// The optimizer must not be used afterwards.
  void give_back() const;

 private:
  ShardedOptimizer::Impl& impl_;
};

/// As `full_state_dict()`, also where that would leave out the state of averages of replicas.
OptimizerStateDict full_inner_state(ShardedOptimizer& optimizer, int recipient);

}  // namespace tessera
