#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// Adam's options, for one step.
struct AdamRule {
  double lr, beta1, beta2, eps, weight_decay;
  bool bias_correction, adamw_mode;
};

/// A parameter to step. All tensors have its shape, and none is a DistTensor.
struct AdamParam {
  at::Tensor param, grad, exp_avg, exp_avg_sq;
  int64_t step = 0;    ///< 1 for the first step
  at::Tensor rounded;  ///< also receives the new values, rounded to its dtype; may be undefined
};

/// Returns the dtype of the moments that `CPUAdam` keeps for parameters of dtype `param`.
inline at::ScalarType moment_dtype(at::ScalarType param) {
  return param == at::kDouble ? at::kDouble : at::kFloat;
}

/// Steps a parameter in host memory, in one pass. There must be an `adam_loop()` for the dtypes.
void step_on_host(const AdamRule& rule, const AdamParam& param);

/// Steps parameters on any devices by LibTorch's fused operators. Ignores `rounded`.
void step_by_operators(const AdamRule& rule, const std::vector<AdamParam>& params);

}  // namespace tessera
