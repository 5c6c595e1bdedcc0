#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

namespace tessera {

/// Returns the strides that the results of an operator have where one process calls it on whole
/// tensors like the tensors among `arguments`, as kernels lay them out; nullopt where LibTorch's
/// functions on tensors without data say so. `sizes` are those of the result.
std::optional<std::vector<int64_t>> strides_by_kernel(const c10::OperatorHandle& op,
                                                      at::ArrayRef<c10::IValue> arguments,
                                                      at::IntArrayRef sizes, bool is_elementwise);

}  // namespace tessera
