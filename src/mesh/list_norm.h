#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "mesh/dist_meta.h"

namespace tessera {

/// Norms of order `order`, at least 0, of tensors of which `norms` are those of this rank's parts;
/// `specs` says how they lie, null for ordinary tensors. Collective over each mesh with sharded
/// tensors, once for those that are sharded over the same mesh dims.
std::vector<at::Tensor> global_norms(std::vector<at::Tensor> norms,
                                     const std::vector<DistSpecPtr>& specs, double order);

}  // namespace tessera
