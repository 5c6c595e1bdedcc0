#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/cpu_adam.h>

#include <cstdint>
#include <map>
#include <vector>

namespace tessera {

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

/// Throws as `CPUAdam::step()` does for a gradient that it can't step with.
void check_adam_gradient(const at::Tensor& param);

/// Steps a parameter in host memory, in one pass. There must be an `adam_loop()` for the dtypes.
void step_on_host(const CPUAdamOptions& options, const AdamParam& param);

/// Steps parameters on any devices by LibTorch's fused operators. Ignores `rounded`.
void step_by_operators(const CPUAdamOptions& options, const std::vector<AdamParam>& params);

/// Tensors that receive the new values of parameters a second time, rounded: in host memory, of the
/// parameter's shape, and of a dtype for which there is an `adam_loop()`.
using RoundedParams = std::map<const c10::TensorImpl*, at::Tensor>;

/// Does `CPUAdam::step()`, and also writes the rounded values. For parameters in host memory.
void step_cpu_adam(CPUAdam& optimizer, const RoundedParams& rounded);

}  // namespace tessera
