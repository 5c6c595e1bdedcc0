#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera {

/// True for an operator with arguments to which results are written (`add.out`), or that changes
/// the shape of a tensor in place (`t_`).
bool replaces_tensor(const c10::FunctionSchema& schema);

/// Calls such an operator on DistTensors: runs the variant that returns new tensors, and writes its
/// results into the arguments. Arguments of the right sizes keep their placements, empty ones get
/// those of the result.
///
/// Throws `c10::ValueError` for an argument of other sizes that is not empty, and
/// `c10::NotImplementedError` for operators that change the memory of a tensor.
void call_replacing(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera
