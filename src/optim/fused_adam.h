#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// One call of LibTorch's fused Adam or AdamW.
struct FusedAdam {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs;
  std::vector<at::Tensor> max_exp_avg_sqs;  ///< with AMSGrad; otherwise empty
  std::vector<at::Tensor> steps;            ///< step count of each parameter, this step included
  bool is_adamw = false;
  double lr = 0, beta1 = 0, beta2 = 0, weight_decay = 0, eps = 0;

  void run() const;
};

/// Returns true for exactly `torch::optim::Adam` and `AdamW`.
bool is_adam(const torch::optim::Optimizer& optimizer);

/// Counts a step of each parameter that has a gradient, makes missing state, and calls `take` with
/// the call to make for each param group.
void collect_adam(torch::optim::Optimizer& optimizer,
                  const std::function<void(const FusedAdam&)>& take);

}  // namespace tessera
