#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "mesh/dist_meta.h"

namespace tessera {

/// Returns the norms of order `order`, at least 0, of whole tensors. `norms` are those of this
/// rank's parts; `specs` are their placements, null for ordinary tensors. Collective over each mesh
/// with sharded tensors, once for all tensors that are sharded over the same mesh dims.
std::vector<at::Tensor> global_norms(std::vector<at::Tensor> norms,
                                     const std::vector<DistSpecPtr>& specs, double order);

}  // namespace tessera
