#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/cpu_adam.h>

#include <map>

namespace tessera {

/// Tensors that receive the new values of parameters a second time, rounded: in host memory, of the
/// parameter's shape, and of a dtype for which there is an `adam_loop()`.
using RoundedParams = std::map<const c10::TensorImpl*, at::Tensor>;

/// Does `CPUAdam::step()`, and also writes the rounded values. For parameters in host memory.
void step_cpu_adam(CPUAdam& optimizer, const RoundedParams& rounded);

}  // namespace tessera
