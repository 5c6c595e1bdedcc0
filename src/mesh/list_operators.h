#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera {

/// True for operators on lists of tensors of which those at one place belong together: foreach
/// operators, fused steps of optimizers, and the check of scaled gradients.
bool takes_lists(const c10::FunctionSchema& schema);

/// Such an operator on lists with DistTensors among them. Tensors at one place must lie on one
/// mesh, otherwise `c10::ValueError` is thrown; lists may mix meshes, placements and ordinary
/// tensors.
///
/// All tensors at a place are given the placements of the first list's, and the operator runs once,
/// on lists of local parts. Collective as far as tensors have to be placed anew, and for norms and
/// the check of gradients.
void call_on_lists(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera
