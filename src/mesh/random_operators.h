#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera {

/// True for operators that draw random numbers.
bool draws_numbers(const c10::FunctionSchema& schema);

/// Such an operator on DistTensors, with the numbers that one process would draw. Returns false if
/// it is one whose numbers depend on values that ranks don't have: then it is still to be called,
/// on whole tensors.
///
/// Throws `c10::ValueError` on all ranks if their generators are not in one state; see
/// `check_generators_agree()`.
bool call_random(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera
