#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera {

/// Replicas that train by themselves and are averaged every few steps: LocalSGD, or DiLoCo (arXiv
/// 2311.08105). Every `every` optimizer steps, the mean over replicas of (start - present) values,
/// where start values are those after the last average, is the gradient of a step of SGD, by the
/// formula of `torch::optim::SGD`, from the start values. Its result is the parameters of all.
/// LocalSGD is a learning rate of 1 without momentum: the result is the mean of the replicas.
struct OuterStep {
  int every = 0;  ///< optimizer steps between two averages; must be given
  double learning_rate = 0.7;
  double momentum = 0.9;  ///< 0: none, and no memory for it
  bool nesterov = true;   ///< no difference without momentum

  /// Dtype in which the differences are sent; none: float, double for double models. kChar (int8)
  /// or kFloat8_e4m3fn: blocks of 256 are sent with a scale in a quarter of float's bytes. Each
  /// replica sends its differences once, rounded, to those that add them up in float, with their
  /// own unrounded ones; the sums are rounded once more, and all replicas use the rounded ones.
  /// What rounding loses of an element is, each time, about 1/254 of the largest of its block
  /// (int8) or 1/16 of itself (float8) at most; with `Precision::error_feedback` it is added to the
  /// next difference, in floats of the size of this rank's part and of its share of the sums, which
  /// are not part of checkpoints. Start values are kept also for LocalSGD. For parameters in host
  /// memory, over connections that can send such messages; where replicas share memory, nothing is
  /// rounded.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
};

}  // namespace tessera
