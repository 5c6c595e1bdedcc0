#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/sharded_optimizer.h>
#include <tessera/export.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace tessera {

class GradScaler;

/// Returns `state`, the state tensor `name` of a parameter (`exp_avg`, `momentum_buffer`, ...:
/// LibTorch's names), with the placements that it is to have, as `redistribute()` returns it.
using StatePlacementFn = std::function<at::Tensor(const std::string& name, const at::Tensor& param,
                                                  const at::Tensor& state)>;

struct DistOptimizerOptions {
  /// Above `kNone`: the tensors to shard over a mesh dim along which all parameters are replicated.
  ShardLevel level = ShardLevel::kNone;
  /// The mesh dim to shard over; none: the first along which all parameters are replicated.
  std::optional<int64_t> mesh_dim = std::nullopt;
  /// Chooses the placements of state tensors at `kNone`; empty: those of their parameters.
  StatePlacementFn place_state = {};
  /// Keeps master weights of this dtype: the optimizer updates them, and narrower parameters are
  /// rounded from them; none: it updates the parameters themselves. Not with `place_state`.
  std::optional<at::ScalarType> master_dtype = std::nullopt;
  /// Above `kNone`, or with `master_dtype`: see `ShardedOptimizerOptions::elementwise`.
  bool elementwise = false;
};

/// Steps the user's own optimizer on parameters that are DistTensors.
///
/// LibTorch's optimizers can step DistTensors by themselves, with state placed like the parameters.
/// This class adds other placements of state, saving and loading, and, at a level above `kNone`,
/// the sharding of state, gradients or parameters over one more mesh dim, by `fully_shard` and
/// `ShardedOptimizer`, whose rules for gradients then apply. It never changes the placements of
/// parameters.
///
/// All members but `inner()` and `sharded()` are collective over the parameters' mesh.
class TESSERA_API DistOptimizer {
 public:
  /// Throws `c10::ValueError`, and changes nothing, for options that contradict each other, if a
  /// level needs parameters that are DistTensors on one mesh and they are not, and if `place_state`
  /// returns anything but a DistTensor of the state's sizes; `c10::NotImplementedError` with
  /// `place_state` for optimizers other than Adagrad, Adam, AdamW, CPUAdam, RMSprop and SGD, and
  /// those that `register_optimizer()` describes.
  DistOptimizer(torch::optim::Optimizer& optimizer, DistOptimizerOptions options = {});

  void step();
  void zero_grad();
  /// Clips as `torch::nn::utils::clip_grad_norm_` does; counts each element once, for any
  /// placements. Parameters may lie on several meshes; collective over the ranks of all of them.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);

  /// Returns the state that a resumed run needs, by name: for each parameter `name.exp_avg` and so
  /// on as DistTensors with its placements, or those of `place_state`, and `name.step` as one
  /// replicated element; `master_weights.name`; `LR_Scheduler` with the learning rate of each param
  /// group. Parameters that `distribute_module` did not name are `param 0`, `param 1`, ...
  ///
  /// Before the first step, also makes the optimizer's state, filled with zeros, so that values can
  /// be loaded into it. (SGD with dampening, and classes that `register_optimizer()` describes,
  /// make their own at the first step: load after one.) Takes the memory of the state, not sharded
  /// over `mesh_dim`. Throws `c10::ValueError` at `kNone` if a parameter has a gradient before the
  /// first step, and `c10::NotImplementedError` as the constructor does with `place_state`.
  std::map<std::string, at::Tensor> state_dict();

  /// Loads values of `state_dict()`: ordinary tensors, or DistTensors with any placements. Throws
  /// `c10::ValueError`, and changes nothing, if entries are missing, unknown or of other sizes; the
  /// message lists all of them.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);

  torch::optim::Optimizer& inner() const { return *optimizer_; }
  /// The optimizer that does the work above `kNone` or with master weights; else null.
  ShardedOptimizer* sharded() const { return sharded_.get(); }

  /// Steps with `scaler`; see `GradScaler`. Returns whether it stepped.
  bool step(GradScaler& scaler);
  void unscale_(GradScaler& scaler);

 private:
  void shard();
  void place_state();
  void after_step();

  torch::optim::Optimizer* optimizer_;
  DistOptimizerOptions options_;
  std::vector<NamedTensor> params_;
  std::unique_ptr<ShardedOptimizer> sharded_;
  std::set<const c10::TensorImpl*> placed_;  // parameters whose state has been placed
  bool has_stepped_ = false;
};

}  // namespace tessera
