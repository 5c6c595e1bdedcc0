#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "tensor/dist_meta.h"

namespace tessera {

// [Note: Where gradients lie]
//
// Ranks that have parts of a batch have terms of the gradient of a parameter that all of them have.
// A leaf redistributes its gradients to fixed placements as they arrive, before they are added up:
// a pending sum over ranks is reduced once, and not by each operator of the optimizer. A hook of
// the leaf does that. Leaves arise in many ways (a frozen parameter that is unfrozen, a clone, a
// tensor that takes the data of another), so an operator that finds a leaf without the hook adds
// it.
//
// An operator may compute parts of its result from a tensor that all ranks have whole, as a linear
// layer that is cut by columns does. The gradient of that tensor consists of terms, too. They are
// reduced when all operators that read the tensor have contributed to the gradient, and before the
// operator that made the tensor reads the gradient, as it would reduce them several times.

/// Adds the hook to `leaf`, a DistTensor that requires a gradient, unless it has it.
void place_gradients(const at::Tensor& leaf);

/// Adds it to all such leaves among the arguments of an operator, if gradients are wanted.
void place_gradients_of(at::ArrayRef<c10::IValue> arguments);

/// Lets terms of the gradient of `tensor` be reduced, to the tensor's own placements, when the
/// gradient is complete. Does nothing for a tensor that requires no gradient, or is a leaf.
void reduce_gradients(const at::Tensor& tensor);

/// Reduces them to the placements of `source` instead, from which the tensor was redistributed, and
/// so reduces and scatters at once.
void reduce_gradients_to(const at::Tensor& tensor, const DistSpecPtr& source);

}  // namespace tessera
