#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>

#include "grad/grad_hook.h"

namespace tessera {

/// Is told that user code cleared, or is about to clear, the gradient of a parameter.
class GradSink {
 public:
  virtual ~GradSink() = default;
  virtual void clear(size_t slot) = 0;
};

/// While it lives, `grad()` of gated tensors can be read on this thread.
class OpenGates {
 public:
  OpenGates();
  ~OpenGates();
  OpenGates(const OpenGates&) = delete;
  OpenGates& operator=(const OpenGates&) = delete;
};

/// Watches `.grad` of `tensor`: reading it throws `error` (its gradient lives elsewhere, an
/// undefined tensor would be a lie), and taking it to write, as every `zero_grad()` does, clears
/// the gradient of `slot` in `sink`. Autograd itself is let through, and so are the hooks that it
/// calls for this tensor. Gradients that it makes are handed to `take`, if there is one, after the
/// user's own hook. Keeps what else autograd knows of the tensor. Once `sink` is gone, `.grad` is
/// as any other's, unless `for_good`.
void install_grad_gate(const at::Tensor& tensor, std::weak_ptr<GradSink> sink, size_t slot,
                       std::string error, const TakeGradient& take = nullptr,
                       bool for_good = false);

/// Undoes `install_grad_gate()`: `.grad` and hooks are the tensor's own again; it is undefined.
void remove_grad_gate(const at::Tensor& tensor);

/// Whom the gate of `tensor` tells; null without one, or if that is gone.
std::shared_ptr<GradSink> grad_sink_of(const at::Tensor& tensor);

/// True for a parameter of a sharded model, and for what its optimizer has in place of one.
bool has_grad_gate(const at::Tensor& tensor);

/// True if `.grad` holds something, gated or not.
bool holds_gradient(const at::Tensor& tensor);
/// Empties `.grad`, past the gate. In a hook that autograd calls for this tensor, that is the
/// gradient which has just come.
at::Tensor take_gradient(const at::Tensor& tensor);

}  // namespace tessera
