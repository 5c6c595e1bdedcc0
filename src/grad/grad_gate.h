#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>

#include "grad/grad_hook.h"

namespace tessera {

/// While it lives, `grad()` of gated tensors can be read on this thread.
class OpenGates {
 public:
  OpenGates();
  ~OpenGates();
  OpenGates(const OpenGates&) = delete;
  OpenGates& operator=(const OpenGates&) = delete;
};

/// Puts a gate before `.grad` of a parameter's tensor. Reading it throws `error`: the gradient lives
/// elsewhere, and an undefined tensor would be a lie. Taking it to write, as every `zero_grad()`
/// does, clears the gradient in the sink of `source`. Autograd itself is let through, and so are
/// the hooks that it calls for this tensor; then the sink takes the gradient. All else that autograd
/// knows of the tensor stays. Once the sink is gone, `.grad` is as any other's.
void install_grad_gate(const at::Tensor& tensor, GradSource source, std::string error);

/// Puts such a gate before `.grad` of a tensor that an optimizer holds in place of a parameter's. No
/// backward reaches it; `zero_grad()` clears the gradient of `slot`, and reading throws also when
/// the sink is gone.
void install_segment_gate(const at::Tensor& tensor, std::weak_ptr<GradSink> sink, size_t slot,
                          std::string error);

/// Undoes `install_grad_gate()`: `.grad` and hooks are the tensor's own again; it is undefined.
void remove_grad_gate(const at::Tensor& tensor);

/// The sink behind the gate of `tensor`; null without a gate, or if the sink is gone.
std::shared_ptr<GradSink> grad_sink_of(const at::Tensor& tensor);

/// True for a parameter of a sharded model, and for the tensor that an optimizer has in its place.
bool has_grad_gate(const at::Tensor& tensor);

/// True if `.grad` holds something, gated or not.
bool holds_gradient(const at::Tensor& tensor);
/// Empties `.grad`, past the gate. In a hook that autograd calls for this tensor, that is the
/// gradient which has just come.
at::Tensor take_gradient(const at::Tensor& tensor);

}  // namespace tessera
