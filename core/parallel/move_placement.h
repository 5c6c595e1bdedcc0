#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/tensor/device_mesh.h>
#include <tessera/tensor/placement.h>

#include <cstdint>
#include <optional>

namespace tessera {

/// Returns `tensor` with the placement `to` along `mesh_dim`, and its own along other mesh dims;
/// differentiable. An ordinary tensor is whole, or, if `given` is set, this rank's part of a tensor
/// with that placement. Collective over `mesh`, on which the tensor must be.
at::Tensor move_placement(const at::Tensor& tensor, const DeviceMesh& mesh, int64_t mesh_dim,
                          const std::optional<Placement>& given, const Placement& to);

}  // namespace tessera
