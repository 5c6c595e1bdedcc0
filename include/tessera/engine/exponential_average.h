#pragma once

#include <tessera/engine/fully_shard.h>
#include <tessera/export.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace tessera {

struct AveragedWeights;

/// An exponential moving average of a sharded model's parameters, to evaluate with or to keep in
/// place of the last values.
///
///     ExponentialAverage average(sharded, 0.999);
///     for (...) {
///       ...
///       optimizer.step();
///       average.update();
///     }
///     average.evaluate([&] { held_out = evaluate(*model); });
///
/// Each rank averages the part of the parameters that its optimizer updates, in float or wider:
/// nothing is sent. As with PyTorch's `AveragedModel`, the first update copies the parameters, and
/// each later one computes `average = decay * average + (1 - decay) * parameter`; buffers are not
/// averaged, and the model's own are used. Parameters that `ShardPlan::ignored` names stay out.
///
/// The average of a frozen parameter is its value. If it is trained later, its average starts from
/// its value at the next update; one that was trained before is averaged on.
///
/// **Memory**: that of the part which this rank updates, at 4 bytes per element (8 for double), but
/// none for units whose parameters are all frozen; while the model has the average, that of this
/// part once more. To save it, pass it as one of
/// several models: see `CheckpointModel` in `checkpoint.h`.
class TESSERA_API ExponentialAverage {
 public:
  /// Throws `c10::ValueError` unless `0 <= decay < 1`. Not collective.
  explicit ExponentialAverage(const ShardedModule& module, double decay = 0.999);

  /// Call it after each step of the optimizer, on all ranks. Not collective. Throws while the
  /// parameters and the average are exchanged.
  void update();
  /// Returns the number of updates, those before a checkpoint that was loaded included.
  int64_t updates() const;

  /// Calls `f` while the model has the averaged values, and returns its result. Collective, as is
  /// `swap()`. If `f` throws, the values stay exchanged: call `swap()` on all ranks to go on.
  template <class F>
  decltype(auto) evaluate(F&& f) {
    swap();
    if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
      std::forward<F>(f)();
      swap();
    } else {
      decltype(auto) result = std::forward<F>(f)();
      swap();
      return result;
    }
  }

  /// Exchanges the values of the model and the average. Collective. Until they are exchanged again,
  /// steps and loads throw; `ShardedModule::unwrap()` leaves the averaged values in the module.
  /// Throws `c10::ValueError` before the first update and while the model has the values of another
  /// average, and `c10::Error` once it was unwrapped.
  void swap();
  bool is_swapped() const;

  /// For the library's own use.
  const std::shared_ptr<AveragedWeights>& weights() const { return weights_; }

 private:
  std::shared_ptr<AveragedWeights> weights_;
};

}  // namespace tessera
