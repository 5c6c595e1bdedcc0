#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstddef>
#include <memory>

namespace tessera {

/// Receives the gradients of a unit's parameters.
class GradSink {
 public:
  virtual ~GradSink() = default;

  /// Autograd has added to `.grad` of `tensor`, which is number `handle` of the tensors of the
  /// parameter in `slot`, and the user's hook has been called: takes the gradient out of there.
  virtual void take(size_t slot, size_t handle, const at::Tensor& tensor) = 0;

  /// User code cleared, or is about to clear, the gradient of the parameter in `slot`.
  virtual void clear(size_t slot) = 0;
};

/// A tensor of a unit's parameter, as its sink knows it.
struct GradSource {
  std::weak_ptr<GradSink> sink;
  size_t slot = 0;
  size_t handle = 0;
};

using HookSlot = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

/// Has the sink of `source` take gradients after the hook in `place`, which is a tensor's only place
/// for one, was called. Does nothing if that is so already. See [Note: One place for two hooks] in
/// grad_hook.cpp.
void chain_hook(HookSlot& place, const GradSource& source);

/// Undoes `chain_hook()`: what the user has set stays.
void unchain_hook(HookSlot& place);

}  // namespace tessera
