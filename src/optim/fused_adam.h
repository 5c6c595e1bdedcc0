#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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

/// Steps such an optimizer: each parameter that has a gradient, with a call for each param group.
/// Makes the state that a parameter lacks.
void step_adam(torch::optim::Optimizer& optimizer);

}  // namespace tessera
