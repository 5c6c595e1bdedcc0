#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/tensor/placement.h>

#include "tensor/dist_meta.h"
#include "tensor/identity.h"

namespace tessera {

/// Returns this rank's part of a tensor of global `sizes` after its placements change from those of
/// `from` to `to` on the same mesh. Without autograd; collective over the mesh. The result may
/// share memory with `local`.
at::Tensor convert(const at::Tensor& local, const DistSpec& from, const Placements& to,
                   at::IntArrayRef sizes, const Subject& subject);

/// Converts onto another mesh. Collective over the ranks of both; a rank that is not in the new
/// mesh gets an empty tensor.
at::Tensor transfer(const at::Tensor& local, const DistSpec& from, const DistSpec& to,
                    at::IntArrayRef sizes, const Subject& subject);

/// Returns the sizes of this rank's part; those of an empty tensor on a rank outside the mesh.
std::vector<int64_t> local_sizes_of(const DistSpec& spec, at::IntArrayRef sizes);

/// Estimates the cost of `convert()` (see `conversion_cost()`) for a tensor of `nbytes`.
double cost_of(const DeviceMesh& mesh, const Placements& from, const Placements& to, double nbytes);

/// True if a change from the placements `from` to `to` moves shards: by an all-gather, or by an
/// all-to-all.
bool moves_shards(const Placements& from, const Placements& to);

}  // namespace tessera
