#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/cpu_adam.h>

#include <map>

namespace tessera {

/// Where the new values of parameters are to be written a second time, rounded: tensors in host
/// memory of the parameter's shape, of a dtype for which there is an `adam_loop()`.
using RoundedParams = std::map<const c10::TensorImpl*, at::Tensor>;

/// `CPUAdam::step()`, which also writes rounded values. For parameters in host memory.
void step_cpu_adam(CPUAdam& optimizer, const RoundedParams& rounded);

}  // namespace tessera
