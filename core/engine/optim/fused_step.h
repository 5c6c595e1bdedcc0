#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// Calls of LibTorch's fused Adam or AdamW: one for the parameters of each device and dtype.
struct FusedAdam {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs;
  std::vector<at::Tensor> max_exp_avg_sqs;  ///< with AMSGrad; otherwise empty
  std::vector<double> steps;                ///< step count of each parameter, this step included

  /// `options`: Adam's, AdamW's or CPUAdam's.
  template <class Options>
  void run(const Options& options, bool is_adamw) const {
    const auto& [beta1, beta2] = options.betas();
    run(is_adamw, options.lr(), beta1, beta2, options.weight_decay(), options.eps());
  }

 private:
  void run(bool is_adamw, double lr, double beta1, double beta2, double weight_decay,
           double eps) const;
};

/// Steps all parameters of `optimizer` that have a gradient with LibTorch's fused kernels, by the
/// options of their param groups. State is kept where the optimizer itself keeps it, so plain and
/// fused steps can be mixed. Returns false, with nothing changed, unless the optimizer is exactly
/// an AdamW, Adam, SGD or Adagrad with dense floating-point parameters, on devices that have the
/// kernel, and the kernel is proved: see [Note: Proof of a kernel] in kernel_proof.cpp.
bool fused_step(torch::optim::Optimizer& optimizer);

}  // namespace tessera
