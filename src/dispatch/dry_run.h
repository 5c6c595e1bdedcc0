#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

namespace tessera {

/// What an operator returns for tensors like those among `arguments`, computed on meta tensors:
/// sizes, strides and dtypes are right, and so are the errors of wrong arguments. Nothing where
/// LibTorch can't do that.
std::optional<torch::jit::Stack> run_on_meta(const c10::OperatorHandle& op,
                                             at::ArrayRef<c10::IValue> arguments);

/// The same by running the operator on tensors of the global sizes, of ones, or zeros where they
/// hold whole numbers, which may be indices: right for all, and dear.
torch::jit::Stack run_on_constants(const c10::OperatorHandle& op,
                                   at::ArrayRef<c10::IValue> arguments);

}  // namespace tessera
