#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

namespace tessera {

/// True for operators that take strides of memory: `as_strided` and the forms of it that copy.
bool takes_strides(const c10::FunctionSchema& schema);

/// Throws `c10::NotImplementedError` if such a call would show what lies between or before the
/// elements of its tensor: a DistTensor does not know it. Does nothing for other operators.
void check_own_elements(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments);

/// For an operator that reads strides: returns `part`, which is all of `tensor`, in memory laid out
/// as that of `tensor` would be.
at::Tensor laid_out_as(const at::Tensor& tensor, const at::Tensor& part);

/// `check_own_elements()`; then replaces the storage offset that such a call asks for by that in
/// the memory of the part `local[0]`.
void shift_offset(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments,
                  torch::jit::Stack& local);

}  // namespace tessera
