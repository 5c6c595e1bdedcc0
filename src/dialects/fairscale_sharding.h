#pragma once

#include <tessera/dialects/fairscale.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "unit/least_loaded.h"

namespace tessera::fairscale::detail {

/// The optimizers that share one sharded model, and the way it is made: from a module's parameters
/// or, for an optimizer by itself, from the optimizer's own.
///
/// A sharded model is never changed. When its parameters get another dtype, or parameters are
/// added, it is taken apart and built anew; owners stay, so no state moves. When the last of its
/// users (the optimizers and the module's wrapper) is destroyed, the parameters are released.
struct Sharding {
  std::shared_ptr<torch::nn::Module> module;  ///< null: an optimizer by itself
  bool has_wrapper = false;                   ///< of the module
  ShardPlan plan;                             ///< without the optimizers' part
  std::vector<OssImpl*> optimizers;
  std::optional<ShardedModule> sharded;

  Sharding() = default;
  ~Sharding();
  Sharding(const Sharding&) = delete;
  Sharding& operator=(const Sharding&) = delete;

  /// Builds the sharded model. Collective. Throws on every rank, and changes nothing, if the
  /// optimizers do not fit.
  void build();
  /// Collective. Gives the parameters back with their owners' values, and leaves the optimizers by
  /// themselves. Discards reduced gradients.
  void dissolve();
  /// Collective. The same with the values that all ranks use. Throws on every rank, and changes
  /// nothing, under `no_sync()` and `keep_unsharded()`, and inside a join.
  void unwrap();
  /// Collective. Takes the model apart, calls `change`, and builds it from each owner's values.
  /// Throws on every rank, and changes nothing, under `no_sync()`, without optimizers, and for
  /// groups that do not fit.
  void rebuild(const std::function<void()>& change);

 private:
  void give_back_optimizers();
  void take_apart();
  void leave_optimizers();
};

struct OssImpl {
  AnyOss* oss = nullptr;
  std::unique_ptr<torch::optim::Optimizer> inner;  ///< steps the parameters that this rank owns
  OssOptions options;
  LeastLoaded ranks{1};                            ///< elements that each rank has to step
  std::map<const c10::TensorImpl*, int> owners;    ///< of the parameters
  std::shared_ptr<Sharding> sharding;              ///< null until it is needed
  std::optional<ShardedOptimizer> sharded;         ///< while the model is built
  std::optional<OptimizerStateDict> consolidated;  ///< unless a step followed

  ~OssImpl();
  void choose_owners();
  void adopt_new_groups();
  bool was_converted() const;
  /// Returns the optimizer, and builds it if need be.
  ShardedOptimizer& ready();
  /// The same before a step or a change of the state, which outdates the consolidated state.
  ShardedOptimizer& ready_to_change();
};

/// Lends the param groups, whose options the user and schedulers change, to the inner optimizer.
/// The parameters are not lent: the inner one has its own.
class LentGroups {
 public:
  explicit LentGroups(OssImpl& impl) : impl_(impl) { swap(); }
  ~LentGroups() { swap(); }
  LentGroups(const LentGroups&) = delete;
  LentGroups& operator=(const LentGroups&) = delete;

 private:
  void swap();
  OssImpl& impl_;
};

}  // namespace tessera::fairscale::detail
