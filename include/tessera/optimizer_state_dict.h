#pragma once

#include <ATen/core/ivalue.h>
#include <tessera/export.h>
#include <tessera/sharded_optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace tessera {

/// The state of an optimizer, as `state_dict()` of PyTorch's optimizers: parameters are numbered
/// from 0 in the order of the param groups, one that is listed again keeps its number.
///
/// It is read and written by the optimizer's own `save()` and `load()`, and so of any class that
/// has them, such as LibTorch's. The user's own must override both, for example by
/// `torch::optim::serialize<ParamState, Options>(archive, *this)`; functions here throw
/// `c10::NotImplementedError` for one that does not.
struct TESSERA_API OptimizerStateDict {
  /// By the names that the class writes (`exp_avg`, `step`, `lr`, ...). An archive inside of
  /// another is a `Dict[str, Any]`.
  using Values = std::map<std::string, c10::IValue>;
  struct ParamGroup {
    Values options;
    std::vector<int64_t> params;  ///< numbers
  };

  /// By parameter number; those without state are left out. Tensors lie on the CPU; those with a
  /// value for each element of the parameter have its shape.
  std::map<int64_t, Values> state;
  std::vector<ParamGroup> param_groups;
  Values extra;  ///< what else the class writes

  /// Writes the layout of LibTorch: `torch::load(optimizer, file)` reads it.
  void save(torch::serialize::OutputArchive& archive) const;

  /// Reads what `torch::save(optimizer, file)` or `save()` wrote. Throws `c10::ValueError` for
  /// another archive, and for one of an optimizer that was saved before LibTorch 1.5.
  static OptimizerStateDict load(torch::serialize::InputArchive& archive);
};

/// Copies the state of an optimizer that is not sharded. Throws `c10::ValueError` for one that is,
/// and `c10::NotImplementedError` if its parameters are DistTensors, which `DistOptimizer` saves.
TESSERA_API OptimizerStateDict state_dict_of(const torch::optim::Optimizer& optimizer);

/// Replaces the state and the options of an optimizer that is not sharded by copies of those in
/// `state_dict`, moved to the parameters' devices; parameters that it has no state of have none
/// then. References to the options stay valid.
///
/// Throws `c10::ValueError` unless there are as many param groups, with as many parameters each. If
/// anything fails, the optimizer is as it was.
TESSERA_API void load_state_dict(torch::optim::Optimizer& optimizer,
                                 const OptimizerStateDict& state_dict);

/// Returns on rank `recipient` of the process group that shards the model (on that rank of each
/// replica), or on all for -1, what the optimizer would have without sharding: `load_state_dict()`
/// of an optimizer of the whole model takes it. `state` is empty on the other ranks.
///
/// Master weights come along as `extra["master_weights"]`, whole tensors by parameter number: they
/// have digits that the parameters do not show. Other optimizers take no notice of them.
///
/// Collective. **Memory**: the ranks' shares travel one after another: a recipient has all state
/// and two copies of one share, others two copies of their own. Master weights are gathered unit by
/// unit, on all ranks.
/// **Throws** on all ranks if one fails; `c10::ValueError` for a `recipient` that is no rank or
/// not the same on all, `c10::NotImplementedError` for parameters that are DistTensors, which
/// `DistOptimizer` saves.
///
/// Tensors of the shape of a rank's part of a parameter are joined; other values, such as counts,
/// are taken from the first rank that has a part.
TESSERA_API OptimizerStateDict full_state_dict(ShardedOptimizer& optimizer, int recipient = 0);

/// Replaces the optimizer's state and options by this rank's part of `state_dict`, which is that of
/// an optimizer that is not sharded, or of a sharded one, on any number of ranks, of any level and
/// partition. `ShardedOptimizer::steps()` stays. References to the options stay valid.
///
/// Parameters stay as they are. Master weights in the state give back their digits, now and until
/// the next step, wherever a parameter has the value that they round to: so it does not matter
/// whether parameters are loaded before or after this.
///
/// Collective: every rank gives the same state.
/// **Throws** `c10::ValueError` unless the param groups have as many parameters as the optimizer's
/// and state tensors have their shapes, or if the ranks were given different state. If anything
/// fails on one rank, all throw, and the optimizer is as it was.
TESSERA_API void load_full_state_dict(ShardedOptimizer& optimizer,
                                      const OptimizerStateDict& state_dict);

}  // namespace tessera
