#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera {

/// True for operators that draw random numbers.
bool draws_numbers(const c10::FunctionSchema& schema);

/// Calls such an operator on DistTensors, with the numbers that one process would draw. Returns
/// false if its numbers depend on values that ranks don't have: the caller must then call it on
/// whole tensors.
///
/// Throws `c10::ValueError` on all ranks if the states of their generators differ, and names those
/// ranks. Collective on the first call of a thread for a mesh and a generator.
bool call_random(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera
