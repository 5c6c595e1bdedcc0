#pragma once

#include <tessera/dialects/fairscale.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "unit/least_loaded.h"

namespace tessera::fairscale::detail {

/// The optimizers that share one sharded model, and how it is made: of a module's parameters, or,
/// for an optimizer by itself, of what it was given.
///
/// A sharded model is never changed. Where its parameters get another dtype, or there are more of
/// them, it is taken apart and built anew; owners stay, so no state moves. With the last of those
/// who use it (optimizers, and the wrapper of the module) the parameters are released.
struct Sharding {
  std::shared_ptr<torch::nn::Module> module;  ///< null: an optimizer by itself
  bool has_wrapper = false;                   ///< of the module
  ShardPlan plan;                             ///< but for what the optimizers say
  std::vector<OssImpl*> optimizers;
  std::optional<ShardedModule> sharded;

  Sharding() = default;
  ~Sharding();
  Sharding(const Sharding&) = delete;
  Sharding& operator=(const Sharding&) = delete;

  /// Collective. Throws on every rank, and changes nothing, for optimizers that do not fit.
  void build();
  /// Collective. Gives the parameters back, as their owners have them, and leaves the optimizers by
  /// themselves. Reduced gradients are forgotten.
  void dissolve();
  /// The same with the values that all ranks use. Throws on every rank, and changes nothing, under
  /// `no_sync()` and where parameters are in use otherwise.
  void unwrap();
  /// Takes apart, changes, builds from the values that each owner has. Throws on every rank, and
  /// changes nothing, under `no_sync()` and for groups that do not fit.
  void rebuild(const std::function<void()>& change);

 private:
  void give_back_optimizers();
  void take_apart();
  void leave_optimizers();
};

struct OssImpl {
  AnyOss* oss = nullptr;
  std::unique_ptr<torch::optim::Optimizer> inner;  ///< steps on what this rank owns
  OssOptions options;
  LeastLoaded ranks{1};                            ///< elements that each has to step
  std::map<const c10::TensorImpl*, int> owners;    ///< of the parameters
  std::shared_ptr<Sharding> sharding;              ///< null until it is needed
  std::optional<ShardedOptimizer> sharded;         ///< while that is built
  std::optional<OptimizerStateDict> consolidated;  ///< of the last step

  ~OssImpl();
  void choose_owners();
  void adopt_new_groups();
  bool was_converted() const;
  /// The optimizer, built if need be.
  ShardedOptimizer& ready();
  /// The same, before it steps or its state is replaced: what was consolidated is old then.
  ShardedOptimizer& ready_to_change();
};

/// Lends the param groups, whose options the user and schedulers change, to the inner optimizer.
/// The parameters stay: the inner one has its own.
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
