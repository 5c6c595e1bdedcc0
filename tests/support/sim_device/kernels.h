#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

namespace tessera::testing::sim {

/// Registers all operators of the backend.
void register_kernels();

/// Takes the operator's arguments from `stack`, issues its CPU kernel on the current stream of
/// their device, and puts outputs there. [Note: Operators]
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

void forget_operators_that_waited();

}  // namespace tessera::testing::sim
