#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

namespace tessera {

/// Registers the operators of LibTorch for DistTensors. Called wherever a DistTensor is made; only
/// the first call has an effect.
void register_dist_operators();

// Kinds of operators that are called on DistTensors in ways of their own, not by a plan alone:
// each has a source of its own.

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

/// True for operators that draw random numbers.
bool draws_numbers(const c10::FunctionSchema& schema);

/// Calls such an operator on DistTensors, with the numbers that one process would draw. Returns
/// false if its numbers depend on values that ranks don't have: the caller must then call it on
/// whole tensors.
///
/// Throws `c10::ValueError` on all ranks if the states of their generators differ, and names those
/// ranks. Collective on the first call of a thread for a mesh and a generator.
bool call_random(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// True for an operator of LibTorch that is registered for DistTensors: others arrive as the
/// operators that they are composed of.
bool has_own_kernel(const c10::OperatorHandle& op);

/// True for an operator that has no rule because it is meant to be computed on whole tensors.
bool is_meant_whole(const std::string& name);

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
