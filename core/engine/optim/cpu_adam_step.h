#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/cpu_adam.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera {

/// A parameter to step. All tensors but the scales have its shape, and none is a DistTensor.
struct AdamParam {
  at::Tensor param, grad, exp_avg, exp_avg_sq;
  int64_t step = 0;    ///< 1 for the first step
  at::Tensor rounded;  ///< also receives the new values, rounded to its dtype; may be undefined
  at::Tensor exp_avg_scale, exp_avg_sq_scale;  ///< of Byte moments
};

/// Returns the dtype of the moments that `CPUAdam` keeps for parameters of dtype `param`.
inline at::ScalarType moment_dtype(at::ScalarType param, at::ScalarType state = at::kFloat) {
  return state == at::kFloat && param == at::kDouble ? at::kDouble : state;
}

/// Throws `c10::NotImplementedError` if moments of parameter `name`, of dtype `param`, can't be
/// kept in `state`.
void check_small(at::ScalarType state, at::ScalarType param, at::Device device, bool is_dist,
                 const std::string& name);

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
