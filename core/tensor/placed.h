#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>

#include "tensor/dist_meta.h"

namespace tessera {

/// Returns the local part of `tensor` after its placements are changed to those of `wanted`, on the
/// same mesh; an ordinary tensor counts as replicated. Collective over the mesh.
at::Tensor placed(const at::Tensor& tensor, const DistSpec& wanted, std::string_view subject);

// [Note: Pending reductions are done once]
//
// A linear operator leaves a sum over ranks pending, so that terms that are added up are reduced
// together, such as those of an attention and of a feed-forward beside it. The first operator that
// needs the values reduces them, and stores the reduced values in its argument in place of this
// rank's term; the value of the tensor does not change. So the residual of a transformer is reduced
// once for all operators that read it, also where autograd saved it.
//
// This applies to tensors that operators made. A tensor that a user made `Partial` stays so, as its
// memory may be the user's. Where other tensors share the memory of the term, the reduced values
// are a copy that follows it (see [Note: Views that are copies]). All ranks do the same: the
// decision depends on the program alone, not on which rank reads a local part.

/// `placed()` for an argument of an operator; a reduction that it does is stored in `tensor`.
at::Tensor placed_argument(const at::Tensor& tensor, const DistSpecPtr& wanted,
                           std::string_view subject);

/// The effect of `placed_argument()` on an argument on a rank that is not in the mesh.
void note_placed_argument(const at::Tensor& tensor, const DistSpecPtr& wanted);

/// Must be called for each tensor that an operator made.
void reduce_once(const at::Tensor& made);
/// Must be called for each view that an operator made of `base`, which it got placed as `given`
/// says.
void reduce_once(const at::Tensor& view, const at::Tensor& base, const DistSpecPtr& given);

/// Throws on all ranks if an argument that the operator writes to is a copy of a view of an
/// expanded tensor: one element of that would be written to by several.
void check_writable(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments);

/// While it lives, arguments of operators that this thread calls keep their terms. Used where an
/// operator is decomposed into others: ranks outside the mesh don't call those.
class KeepTerms {
 public:
  KeepTerms();
  ~KeepTerms();
  KeepTerms(const KeepTerms&) = delete;
  KeepTerms& operator=(const KeepTerms&) = delete;

 private:
  const bool before_;
};

/// Returns the mesh of the DistTensors among an operator's arguments, of which there must be one at
/// least.
///
/// Throws `c10::ValueError` if they are on several meshes, or together with an ordinary tensor that
/// requires a gradient.
const DeviceMesh& mesh_of_arguments(const c10::OperatorHandle& op,
                                    at::ArrayRef<c10::IValue> arguments);

/// Throws `c10::NotImplementedError` if the results of a call have numbers, or sizes, that a rank
/// outside of `mesh` can't know, since they depend on values.
void check_known_outside(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
                         const DeviceMesh& mesh);

/// Returns the device of an operator's tensors; the CPU if it has none.
c10::Device device_of(at::ArrayRef<c10::IValue> arguments);

/// Returns the index of the argument that `result` is, if it is one that is written to; else
/// nullopt.
std::optional<size_t> written_index(const c10::FunctionSchema& schema, size_t result);

}  // namespace tessera
