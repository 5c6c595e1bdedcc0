#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/export.h>
#include <tessera/sharded_optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace tessera {

class GradScaler;

/// Returns the state tensor `name` (`exp_avg`, `momentum_buffer`, ...: LibTorch's names) of a
/// parameter with the placements that it shall have, as `redistribute()` gives it.
using StatePlacementFn = std::function<at::Tensor(const std::string& name, const at::Tensor& param,
                                                  const at::Tensor& state)>;

struct DistOptimizerOptions {
  /// Above `kNone`: what is sharded over a mesh dim along which all parameters are replicated.
  ShardLevel level = ShardLevel::kNone;
  /// That mesh dim; none: the first along which all parameters are replicated.
  std::optional<int64_t> mesh_dim = std::nullopt;
  /// Where state tensors lie at `kNone`; empty: as their parameters.
  StatePlacementFn place_state = {};
  /// Updates masters of this dtype, from which narrower parameters are rounded; none: the
  /// parameters themselves. Not together with `place_state`.
  std::optional<at::ScalarType> master_dtype = std::nullopt;
};

/// Steps the user's own optimizer on parameters that are DistTensors.
///
/// LibTorch's optimizers do that by themselves, with state that lies as the parameters do. This
/// adds state placed otherwise, what is saved and loaded, and, at a level above `kNone`, state,
/// gradients or parameters sharded over one more mesh dim, by `fully_shard` and `ShardedOptimizer`,
/// whose rules for gradients hold then. Placements of parameters never change.
///
/// Collective over the parameters' mesh, as are all members but `inner()`.
class TESSERA_API DistOptimizer {
 public:
  /// Throws `c10::ValueError`, and changes nothing, for options that contradict each other, for
  /// parameters that are not DistTensors on one mesh where a level asks for that, and for state
  /// placements that are no DistTensor of the state's sizes; `c10::NotImplementedError` with
  /// `place_state` for other optimizers than Adagrad, Adam, AdamW, CPUAdam, RMSprop and SGD.
  DistOptimizer(torch::optim::Optimizer& optimizer, DistOptimizerOptions options = {});
  ~DistOptimizer();
  DistOptimizer(DistOptimizer&&) noexcept;
  DistOptimizer& operator=(DistOptimizer&&) noexcept;

  void step();
  void zero_grad();
  /// As `torch::nn::utils::clip_grad_norm_`: each element counts once, however parameters lie.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);

  /// What a resumed run needs, by name: for each parameter `name.exp_avg` and so on as DistTensors
  /// with its placements, or those of `place_state`, and `name.step` as one replicated element;
  /// `master_weights.name`; `LR_Scheduler` with the learning rate of each param group. Parameters
  /// that `distribute_module` did not name are `param 0`, `param 1`, ...
  ///
  /// Before the first step the state that it would make is made, of zeros, so that it can be loaded
  /// into. (SGD with dampening makes its own at the first step.) Takes the memory of the state, not
  /// sharded over `mesh_dim`. Throws `c10::ValueError` at `kNone` if a parameter has a gradient
  /// before the first step, and `c10::NotImplementedError` as the constructor does with
  /// `place_state`.
  std::map<std::string, at::Tensor> state_dict();

  /// Takes values of `state_dict()`: ordinary tensors, or DistTensors with any placements. Throws
  /// `c10::ValueError`, and changes nothing, naming all that is missing, unknown or of other sizes.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);

  torch::optim::Optimizer& inner() const;
  /// The one that does the work above `kNone` or with masters; else null.
  ShardedOptimizer* sharded() const;

  /// Steps with `scaler`; see `GradScaler`. Returns whether it stepped.
  bool step(GradScaler& scaler);
  void unscale_(GradScaler& scaler);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
