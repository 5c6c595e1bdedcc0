#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>
#include <tessera/export.h>
#include <tessera/tensor/device_mesh.h>
#include <tessera/tensor/placement.h>

#include <optional>

namespace tessera {

// Make DistTensors of these global sizes part by part: each rank has memory for its part only, so a
// tensor may be larger than the memory of any rank.
//
//     auto weight = tessera::dist_randn({1'000'000, 4096}, mesh, {tessera::Shard{0}});
//
// Missing placements are `Replicate`. For `Partial(sum)` the first rank of the mesh dim has the
// values and the others zeros, as `distribute()` does it. `options` are those of `torch::zeros()`
// and so on: dtype, device and requires_grad. On a rank that is not in `mesh`, the tensor has no
// local elements.
//
// All throw `c10::ValueError` for negative sizes, for placements as `distribute()` does, and for
// options of tensors that are not dense and contiguous.

/// Return a DistTensor of zeros, of ones, of `value`, or of memory that is not initialized. Nothing
/// is sent.
TESSERA_API at::Tensor dist_zeros(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                  Placements placements, at::TensorOptions options = {});
TESSERA_API at::Tensor dist_ones(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                 Placements placements, at::TensorOptions options = {});
TESSERA_API at::Tensor dist_full(at::IntArrayRef sizes, const at::Scalar& value,
                                 const DeviceMesh& mesh, Placements placements,
                                 at::TensorOptions options = {});
TESSERA_API at::Tensor dist_empty(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                  Placements placements, at::TensorOptions options = {});

/// Return a DistTensor with the values, to the bit, that `torch::rand(sizes, generator, options)`
/// or `torch::randn()` returns in one process, for any placements, and leave the generator in the
/// same state. Without `generator` they draw from the calling rank's `default_generator()`, on
/// another device than the CPU from that device's.
///
/// Generators must be in one state on all ranks; this is checked on the first use of one on a mesh,
/// as for all random numbers of DistTensors; ranks that are not in `mesh` must call this, too, to
/// stay in step. Nothing else is sent.
///
/// **Time and memory**: each rank draws the numbers of the whole tensor, on the CPU in blocks of
/// 2^20 of which it keeps its own. On other devices, where the numbers depend on the size of the
/// whole, it draws all at once and frees the rest.
TESSERA_API at::Tensor dist_rand(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                 Placements placements, at::TensorOptions options = {},
                                 std::optional<at::Generator> generator = std::nullopt);
TESSERA_API at::Tensor dist_randn(at::IntArrayRef sizes, const DeviceMesh& mesh,
                                  Placements placements, at::TensorOptions options = {},
                                  std::optional<at::Generator> generator = std::nullopt);

}  // namespace tessera
