#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

namespace tessera {

// [Note: Memory that does not hold the values]
//
// LibTorch conjugates and negates lazily: a conjugate, and the imaginary part of one, are views of
// the original tensor's memory, and a bit of the view says that its values differ from that memory.
// The gradient of `torch.sgn()` and of other functions that are constant almost everywhere is a
// tensor of zeros that has no memory at all. Operators know both; code that accesses memory
// directly must check it itself. Process groups, checkpoints, gradients of units and DistTensors do
// so for the tensors that they are given.

/// Returns true if the memory of `tensor` does not hold its values.
inline bool has_math_bits(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor());
}

/// Returns `tensor`, or a copy of it whose memory holds its values.
inline at::Tensor with_plain_memory(const at::Tensor& tensor) {
  if (!has_math_bits(tensor)) return tensor;
  const at::NoGradGuard no_grad;
  if (tensor._is_zerotensor()) return at::zeros_like(tensor);
  return tensor.resolve_conj().resolve_neg();
}

/// Returns `values`, or a copy, that is marked as a conjugate or a negative if `like` is.
inline at::Tensor with_marks_of(const at::Tensor& like, const at::Tensor& values) {
  if (like.is_conj() == values.is_conj() && like.is_neg() == values.is_neg()) return values;
  at::Tensor marked = with_plain_memory(values);
  if (like.is_conj()) marked = marked.conj_physical();
  if (like.is_neg()) marked = marked.neg()._neg_view();
  return like.is_conj() ? marked._conj() : marked;
}

}  // namespace tessera
