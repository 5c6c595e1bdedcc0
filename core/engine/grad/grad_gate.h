#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>

namespace tessera {

class UnitGradients;

/// One of the tensors of a unit's parameter.
struct GradSource {
  std::weak_ptr<UnitGradients> unit;
  size_t slot = 0;
  size_t handle = 0;
};

/// While it lives, this thread can read `grad()` of gated tensors.
class OpenGates {
 public:
  OpenGates();
  ~OpenGates();
  OpenGates(const OpenGates&) = delete;
  OpenGates& operator=(const OpenGates&) = delete;
};

/// Puts a gate before `.grad` of a parameter's tensor. Reading `.grad` throws `error`: the gradient
/// is stored elsewhere, and an undefined tensor would be misleading. Requesting `.grad` for
/// writing, as every `zero_grad()` does, clears the gradient in the unit of `source`. Autograd
/// itself passes the gate, and so do the hooks that it calls for this tensor; then the unit takes
/// the gradient. The rest of the tensor's autograd metadata stays. Once the unit's gradients are
/// destroyed, `.grad` behaves like any other tensor's. See [Note: One place for two hooks] in
/// grad_gate.cpp.
void install_grad_gate(const at::Tensor& tensor, GradSource source, std::string error);

/// Puts such a gate before `.grad` of a tensor that an optimizer holds in place of a parameter. No
/// backward reaches this tensor; `zero_grad()` clears the gradient of `slot`, and reading throws
/// even when the unit's are destroyed.
void install_segment_gate(const at::Tensor& tensor, std::weak_ptr<UnitGradients> unit, size_t slot,
                          std::string error);

/// Undoes `install_grad_gate()`: the tensor has its own hooks and its own `.grad` again, an
/// undefined one.
void remove_grad_gate(const at::Tensor& tensor);

/// Returns the gradients behind the gate of `tensor`; null without a gate, or if they were
/// destroyed.
std::shared_ptr<UnitGradients> gradients_behind(const at::Tensor& tensor);

/// Returns true for a parameter of a sharded model, and for the tensor that an optimizer holds in
/// its place.
bool has_grad_gate(const at::Tensor& tensor);

/// Returns true if reading `.grad` would throw: the gate is closed.
bool hides_gradient(const at::Tensor& tensor);

/// Returns true if `.grad` holds a gradient, gated or not.
bool holds_gradient(const at::Tensor& tensor);
/// Moves the gradient out of `.grad`, bypassing the gate. In a hook that autograd calls for this
/// tensor, that is the gradient that has just arrived.
at::Tensor take_gradient(const at::Tensor& tensor);

}  // namespace tessera
