#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>

namespace tessera {

/// To be called before an operator uses a parameter. Inside a backward (recomputation), gradients
/// of what it makes are handed on to that backward, which reduces them: then nothing is said of
/// them.
void note_use_in_backward();

/// Warns, once per model, of a gradient of `tensor` that `torch::autograd::grad()` returns: it is
/// this rank's own, as nothing reduces it. `warned` is the model's; while it is true, nothing is
/// said.
void watch_captures(const at::Tensor& tensor, const std::string& name,
                    std::shared_ptr<std::atomic<bool>> warned);

}  // namespace tessera
