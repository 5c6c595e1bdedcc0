#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>

namespace tessera {

/// Must be called before an operator uses a parameter. Inside a backward (recomputation), the
/// gradients of the operator's results flow into that backward, are reduced by it, and cause no
/// warning.
void note_use_in_backward();

/// Warns, once per model, when `torch::autograd::grad()` returns a gradient of `tensor`: it is this
/// rank's own, as nothing reduces it. `warned` belongs to the model; while it is true, there is no
/// warning.
void watch_captures(const at::Tensor& tensor, const std::string& name,
                    std::shared_ptr<std::atomic<bool>> warned);

}  // namespace tessera
