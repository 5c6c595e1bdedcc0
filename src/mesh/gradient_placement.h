#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace tessera {

// [Note: Where gradients lie]
//
// Ranks that have parts of a batch have terms of the gradient of a parameter that they all have. A
// leaf gives its gradients placements of its own as they come, before they are added up: a pending
// sum over ranks is done once, and not by each operator of the optimizer. A hook of the leaf does
// that. Leaves come to be in many ways (a frozen parameter that thaws, a clone, one that takes the
// data of another), so that an operator that finds a leaf without the hook gives it one.
//
// What an operator makes parts of from a tensor that all ranks have whole, as a linear layer that
// is cut by columns does, gives this tensor a gradient in terms, too. They are reduced when the
// gradient is complete, by all operators that read the tensor, and before the operator that made it
// reads it, which would do so several times.

/// Gives `leaf`, a DistTensor that requires a gradient, the hook, unless it has it.
void place_gradients(const at::Tensor& leaf);

/// The same for all such leaves among the arguments of an operator, if gradients are wanted.
void place_gradients_of(at::ArrayRef<c10::IValue> arguments);

/// Lets terms of the gradient of `tensor` be reduced, to where it lies itself, when the gradient is
/// complete. Does nothing for a tensor that needs no gradient, or is a leaf.
void reduce_gradients(const at::Tensor& tensor);

}  // namespace tessera
