#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera {

/// True for operators on lists of tensors in which the tensors at one position belong together:
/// foreach operators, fused steps of optimizers, and the check of scaled gradients.
bool takes_lists(const c10::FunctionSchema& schema);

/// Calls such an operator on lists with DistTensors among them. Tensors at one position must be on
/// one mesh, otherwise `c10::ValueError` is thrown; lists may mix meshes, placements and ordinary
/// tensors.
///
/// All tensors at a position get the placements of the first list's tensor, and the operator runs
/// once, on lists of local parts. Collective where tensors have to be placed anew, and for norms
/// and the check of gradients.
void call_on_lists(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera
