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

  /// Takes the gradient out of `.grad` of `tensor`, which is number `handle` of the tensors of the
  /// parameter in `slot`. Called after autograd has added to `.grad` and the user's hook has run.
  virtual void take(size_t slot, size_t handle, const at::Tensor& tensor) = 0;

  /// Called when user code has cleared, or is about to clear, the gradient of the parameter in
  /// `slot`.
  virtual void clear(size_t slot) = 0;
};

/// Identifies a tensor of a unit's parameter to the unit's sink.
struct GradSource {
  std::weak_ptr<GradSink> sink;
  size_t slot = 0;
  size_t handle = 0;
};

using HookSlot = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

/// Makes the sink of `source` take gradients after the hook in `place`, a tensor's only place for a
/// hook, has been called. Does nothing if the hook is chained already. See [Note: One place for two
/// hooks] in grad_hook.cpp.
void chain_hook(HookSlot& place, const GradSource& source);

/// Undoes `chain_hook()`: the user's hook stays.
void unchain_hook(HookSlot& place);

}  // namespace tessera
