#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/sharded_optimizer.h>
#include <tessera/export.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// The defaults are those of PyTorch's `GradScaler`.
struct GradScalerOptions {
  double init_scale = 65536.0;     ///< initial scale of the loss
  double growth_factor = 2.0;      ///< of the scale, after `growth_interval` steps without overflow
  double backoff_factor = 0.5;     ///< of the scale, after an overflow
  int64_t growth_interval = 2000;  ///< steps
  /// Number of overflows since the scale last grew, from which on each overflow reduces the scale.
  int64_t hysteresis = 1;
  double min_scale = 0;  ///< the scale stays between this and `max_scale`
  double max_scale = std::numeric_limits<double>::infinity();
  /// Further ranks beside those of the model, such as those that hold other parts of it: if one of
  /// them finds an overflow, all skip the step; all must make the same calls. Null: none.
  ProcessGroupPtr process_group = nullptr;
  bool enabled = true;  ///< false: every call behaves as without a scaler
};

/// Prevents small gradients in half precision from becoming zero: multiplies the loss by an
/// adaptive scale, and skips a step whose gradients overflow, on all ranks or on none.
///
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);  // unscales, and skips the step if a gradient is not finite
///     scaler.update();
///
/// Works on the CPU as on a GPU. All ranks must make the same calls. Call orders that PyTorch
/// refuses are refused here, too, with the same messages (`std::runtime_error`).
class TESSERA_API GradScaler {
 public:
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// Returns `outputs` times the scale, for backward. The scale is a float: the product with a half
  /// loss without dimensions is a float, and does not overflow.
  at::Tensor scale(const at::Tensor& outputs) const;
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs) const;

  /// Divides the optimizer's reduced gradients by the scale, for example to clip them before the
  /// step, and records whether any rank has one that is not finite. Collective over all mesh dims
  /// of the model. May be called once per optimizer and update.
  void unscale_(ShardedOptimizer& optimizer);

  /// Unscales the gradients, if that was not done yet, and steps if all gradients of all ranks are
  /// finite. Returns whether it stepped, the same on all ranks. Collective. Throws, as `unscale_()`
  /// does, if `scale()` was not called since the last update, unless the scale is 1.
  bool step(ShardedOptimizer& optimizer);
  /// As above, for an optimizer of LibTorch that is not sharded. Gradients that are DistTensors
  /// keep their placements; collective over their meshes.
  void unscale_(torch::optim::Optimizer& optimizer);
  bool step(torch::optim::Optimizer& optimizer);

  /// Throws `std::runtime_error`, because a closure would need gradients of different scales. If
  /// disabled, calls `optimizer.step(closure)`.
  bool step(ShardedOptimizer& optimizer, const std::function<at::Tensor()>& closure);

  /// Adapts the scale to the overflows in the steps since the last update, or sets it to
  /// `new_scale`.
  void update(std::optional<double> new_scale = std::nullopt);
  void update(const at::Tensor& new_scale);  ///< a tensor of one element

  double get_scale() const;  ///< 1 if disabled
  bool is_enabled() const;
  const GradScalerOptions& options() const;
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(int64_t steps);

  /// Returns everything that a resumed run needs, under the names of PyTorch's `state_dict()`;
  /// empty if disabled.
  std::map<std::string, double> state() const;
  /// Restores `state`. Throws `c10::ValueError` if an entry is missing.
  void load_state(const std::map<std::string, double>& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
