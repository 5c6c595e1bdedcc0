#pragma once

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
};

}  // namespace tessera
