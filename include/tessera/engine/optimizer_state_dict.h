#pragma once

#include <ATen/core/ivalue.h>
#include <tessera/engine/sharded_optimizer.h>
#include <tessera/export.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace tessera {

/// The state of an optimizer, like `state_dict()` of PyTorch's optimizers: parameters are numbered
/// from 0 in the order of the param groups; one that is listed again keeps its number.
///
/// It is read and written through the optimizer's own `save()` and `load()`, so it works for any
/// class that overrides both, as LibTorch's do. A user's class can do so by
/// `torch::optim::serialize<ParamState, Options>(archive, *this)`; for a class that does not, the
/// functions here throw `c10::NotImplementedError`.
struct TESSERA_API OptimizerStateDict {
  /// Values by the names that the class writes (`exp_avg`, `step`, `lr`, ...). A nested archive is
  /// a `Dict[str, Any]`.
  using Values = std::map<std::string, c10::IValue>;
  struct ParamGroup {
    Values options;
    std::vector<int64_t> params;  ///< numbers of the parameters
  };

  /// State by parameter number; parameters without state are left out. Tensors are on the CPU;
  /// those with one value for each element of the parameter have its shape.
  std::map<int64_t, Values> state;
  std::vector<ParamGroup> param_groups;
  Values extra;  ///< all other values that the class writes

  /// Writes LibTorch's layout, for `torch::load(optimizer, file)`.
  void save(torch::serialize::OutputArchive& archive) const;

  /// Reads an archive that `torch::save(optimizer, file)` or `save()` wrote. Throws
  /// `c10::ValueError` for any other archive, and for one of an optimizer that was saved before
  /// LibTorch 1.5.
  static OptimizerStateDict load(torch::serialize::InputArchive& archive);
};

/// Returns a copy of the state of an optimizer that is not sharded. Throws `c10::ValueError` for
/// one that is, and `c10::NotImplementedError` if its parameters are DistTensors: `DistOptimizer`
/// saves those.
TESSERA_API OptimizerStateDict state_dict_of(const torch::optim::Optimizer& optimizer);

/// Replaces the state and the options of an optimizer that is not sharded by copies of those in
/// `state_dict`, moved to the parameters' devices; parameters that `state_dict` has no state for
/// lose theirs. References to the options stay valid.
///
/// Throws `c10::ValueError` unless the numbers of param groups, and of parameters in each, are
/// equal. If anything fails, the optimizer is unchanged.
TESSERA_API void load_state_dict(torch::optim::Optimizer& optimizer,
                                 const OptimizerStateDict& state_dict);

/// Returns on rank `recipient` of the process group that shards the model (on that rank of each
/// replica), or on all ranks for -1, the state that the optimizer would have without sharding:
/// `load_state_dict()` of an optimizer of the whole model accepts it. `state` is empty on the other
/// ranks.
///
/// Includes the master weights as `extra["master_weights"]`, whole tensors by parameter number:
/// they have digits that rounding removes from the parameters. Other optimizers ignore them.
///
/// Collective. **Memory**: the ranks' parts are sent one after another: a recipient holds the full
/// state and two copies of one part, other ranks two copies of their own part. Master weights are
/// gathered unit by unit, on all ranks.
/// **Throws** on all ranks if one fails; `c10::ValueError` for a `recipient` that is not a rank or
/// differs between ranks, `c10::NotImplementedError` for parameters that are DistTensors:
/// `DistOptimizer` saves those.
///
/// Tensors with the shape of a rank's part of a parameter are joined; other values, such as counts,
/// are taken from the first rank that has a part.
TESSERA_API OptimizerStateDict full_state_dict(ShardedOptimizer& optimizer, int recipient = 0);

/// Replaces the optimizer's state and options by this rank's part of `state_dict`: the state of an
/// unsharded optimizer, or of a sharded one on any number of ranks, of any level and partition.
/// Does not change `ShardedOptimizer::steps()`. References to the options stay valid.
///
/// Does not change parameters either. Master weights in the state restore the digits lost in
/// rounding, now and until the next step, wherever a parameter equals the rounded master weight: so
/// parameters may be loaded before or after this.
///
/// Collective: every rank passes the same state.
/// **Throws** `c10::ValueError` unless the param groups have as many parameters as the optimizer's
/// and state tensors have their shapes, or if the ranks were given different state. If anything
/// fails on one rank, all throw, and the optimizer is unchanged.
TESSERA_API void load_full_state_dict(ShardedOptimizer& optimizer,
                                      const OptimizerStateDict& state_dict);

}  // namespace tessera
