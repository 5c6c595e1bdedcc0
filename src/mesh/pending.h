#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "mesh/dist_meta.h"

namespace tessera {

// [Note: Pending reductions are done once]
//
// An operator that is linear leaves a sum over ranks pending, so that terms that are added up are
// reduced together: those of an attention and of a feed-forward beside it. The first operator that
// needs the values reduces them, and its argument then is what came of that: in place of the term,
// this rank gets the reduced values, since the tensor's value is the same. So the residual of a
// transformer, which many operators read, is reduced once, and so it is in what autograd saved.
//
// That is done to what operators made. A tensor that a user made `Partial` stays so, as its memory
// may be the user's. Where other tensors show the memory of the term, the reduced values are a copy
// that follows it (see [Note: Views that are copies]). All ranks do it alike: it depends on the
// program alone, not on who looks at a local part.

/// `placed()` for an argument of an operator; a reduction that this does is done for `tensor`.
at::Tensor placed_argument(const at::Tensor& tensor, const DistSpecPtr& wanted,
                           std::string_view subject);

/// What that does to an argument on a rank that is not in the mesh.
void note_placed_argument(const at::Tensor& tensor, const DistSpecPtr& wanted);

/// To be called for a tensor that an operator made.
void reduce_once(const at::Tensor& made);
/// The same for a view of `base`.
void reduce_once(const at::Tensor& view, const at::Tensor& base);

/// While it lives, arguments of operators that this thread calls keep their terms: in the operators
/// of which others are made, which ranks that are not in the mesh don't call.
class KeepTerms {
 public:
  KeepTerms();
  ~KeepTerms();
  KeepTerms(const KeepTerms&) = delete;
  KeepTerms& operator=(const KeepTerms&) = delete;

 private:
  const bool before_;
};

}  // namespace tessera
