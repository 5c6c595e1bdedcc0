#pragma once

#include <tessera/dialects/fairscale.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine/model/sharded_state.h"
#include "engine/unit/least_loaded.h"

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
  /// Collective. Gives the parameters back, and leaves the optimizers by themselves. Discards
  /// reduced gradients. With `GivenValues::kUsed`, throws on every rank, and changes nothing, under
  /// `no_sync()` and `keep_unsharded()`, and inside a join.
  void dissolve(GivenValues which);
  /// Collective. Takes the model apart, calls `change`, and builds it from each owner's values.
  /// Throws on every rank, and changes nothing, under `no_sync()`, without optimizers, and for
  /// groups that do not fit.
  void rebuild(const std::function<void()>& change);

 private:
  void take_apart(GivenValues which);
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
  /// Returns the parameters in the order of the groups.
  std::vector<at::Tensor> params() const;
  void choose_owners();
  void adopt_new_groups();
  /// Returns the optimizer, and builds it if need be.
  ShardedOptimizer& ready();
  /// Calls `use` with the optimizer. Lends it the options of the param groups, where the user and
  /// schedulers change them, but not the parameters: the inner optimizer has its own.
  void lend(const std::function<void(ShardedOptimizer&)>& use);

 private:
  void swap_groups();
};

}  // namespace tessera::fairscale::detail
