#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

namespace tessera {

/// True for a call whose results' sizes depend on values of tensors, such as an index by a mask.
bool has_sizes_by_values(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments);

/// Runs an operator on meta tensors like the tensors among `arguments` and returns its results:
/// sizes, strides and dtypes are right, and wrong arguments raise the operator's own errors.
/// Nullopt where LibTorch can't run the operator on meta tensors.
std::optional<torch::jit::Stack> run_on_meta(const c10::OperatorHandle& op,
                                             at::ArrayRef<c10::IValue> arguments);

/// Returns the same by running the operator on tensors of the global sizes, filled with ones, or
/// with zeros if the dtype is integral, as these may be indices. Works for all operators, but is
/// expensive.
torch::jit::Stack run_on_constants(const c10::OperatorHandle& op,
                                   at::ArrayRef<c10::IValue> arguments);

}  // namespace tessera
