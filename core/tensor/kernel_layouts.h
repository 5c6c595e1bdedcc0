#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <span>
#include <string_view>

namespace tessera {

/// An input that a kernel of LibTorch reads as if its memory were contiguous: the functions above
/// the kernel make it so, or it is a result of the kernel of the forward. `op` is named with its
/// namespace.
struct ContiguousInput {
  std::string_view op, argument;
};

/// All that are known: found by running each kernel that PyTorch's operator tests call, with each
/// input strided.
std::span<const ContiguousInput> contiguous_inputs();

/// Returns the name of such an input of a call on ordinary tensors that is not laid out so; ""
/// where all are.
std::string_view find_strided_input(const c10::FunctionSchema& schema,
                                    at::ArrayRef<const c10::IValue> arguments);

/// With TESSERA_CHECK_LAYOUTS=1 in the environment, checks each kernel that runs below autograd on
/// parts of DistTensors from now on, and ends the process with a message at the first one that
/// would read a strided input as contiguous. Random programs on DistTensors run with it.
void check_kernel_layouts();

}  // namespace tessera
