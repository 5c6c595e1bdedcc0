#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/export.h>
#include <tessera/tensor/device_mesh.h>
#include <tessera/tensor/placement.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

// A *DistTensor* is an `at::Tensor` that stands for a global tensor of which each rank of a device
// mesh holds a part. It has the global sizes, dtype and values: operators on it return the results
// that they would return for the whole tensor in one process, and `backward()` and `torch::optim`
// work on it. It has no memory of its own: `data_ptr()`, `storage()` and so `torch::save()` throw,
// and the message names the function to call instead.
//
// Operators are collective over the mesh: all its ranks call the same ones in the same order.
//
//     auto mesh = tessera::DeviceMesh::over_world();
//     auto weight = tessera::distribute(torch::randn({8, 6}), mesh, {tessera::Shard{0}});
//     auto product = torch::mm(input, weight.t());             // local matrix product
//     auto whole = tessera::full_tensor(product);              // an ordinary tensor, on every rank

/// Returns true if `tensor` is a DistTensor.
TESSERA_API bool is_dist(const at::Tensor& tensor);

/// Distributes `tensor`, whose values must be equal on all ranks, over `mesh`: each rank keeps its
/// part, and nothing is sent. Missing placements are `Replicate`.
///
/// For `Partial(sum)` the first rank of the mesh dim gets the values and the others zeros, so that
/// they add up to `tensor`. The parts are copies, except that a replicated tensor is kept as it is.
/// A leaf that requires a gradient gives a leaf that does; for other tensors, gradients flow back.
/// On a rank that is not in `mesh`, the DistTensor has no local elements.
/// Throws `c10::ValueError` for more placements than the mesh has dims, and for a `Shard` dim that
/// the tensor does not have.
TESSERA_API at::Tensor distribute(const at::Tensor& tensor, const DeviceMesh& mesh,
                                  Placements placements);

/// Turns `tensor` itself, a parameter or a buffer of a module, into a DistTensor with these
/// placements, so that the module computes with it from then on. Redistributes a DistTensor.
///
/// Like `distribute()` it needs equal values on all ranks and sends nothing, unless `tensor` is a
/// DistTensor already. Drops the gradient; later gradients have the parameter's placements. Throws
/// `c10::ValueError` for the result of an operator that autograd tracks (not a leaf).
TESSERA_API void distribute_(const at::Tensor& tensor, const DeviceMesh& mesh,
                             Placements placements);

/// Makes a DistTensor from the parts that the ranks of `mesh` hold; nothing is sent or compared.
/// It is contiguous, and shares memory with parts that are, unless their numbers are those of their
/// memory conjugated or negated (`is_conj()`, `is_neg()`). All ranks of `mesh` must call it: they
/// number such tensors, and compare the numbers when they exchange parts.
///
/// `sizes` are the global sizes; if left out, all parts are assumed to have equal sizes. Throws
/// `c10::ValueError` if this rank's part does not have the sizes that the placements give it.
/// Differentiable: the gradient of `local` is this rank's part of the gradient.
TESSERA_API at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                  Placements placements,
                                  std::optional<std::vector<int64_t>> sizes = std::nullopt);

/// Returns this rank's part. It shares memory with the DistTensor. Differentiable: gradients of the
/// part have the placements of `tensor`, with `Replicate` in place of `Partial`. With a `Partial`
/// result of an operator, memory is shared until an operator reduces that result. Throws
/// `c10::ValueError` for an ordinary tensor.
TESSERA_API at::Tensor to_local(const at::Tensor& tensor);

/// As above, but gradients of the part have these placements: `Partial` where each rank computes a
/// term of the gradient, as it uses the whole tensor with its part of another one. Throws
/// `c10::ValueError` unless they cut the same dims as those of `tensor`.
TESSERA_API at::Tensor to_local(const at::Tensor& tensor, Placements gradient_placements);

/// Returns the same global tensor with other placements; differentiable, and never changes
/// `tensor`.
///
/// Collective over the mesh. Sends as little as possible: from `Replicate` nothing, from `Partial`
/// to `Shard` a reduce-scatter, from `Shard` to `Shard` of another dim an all-to-all.
TESSERA_API at::Tensor redistribute(const at::Tensor& tensor, Placements placements);

/// Redistributes to another mesh. Collective over the ranks of both meshes.
TESSERA_API at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    Placements placements);

/// Returns the global values as an ordinary tensor, on every rank of the mesh. Collective;
/// differentiable.
TESSERA_API at::Tensor full_tensor(const at::Tensor& tensor);

/// Return the mesh and the placements of `tensor`. A `Partial` result of an operator may become
/// `Replicate` or `Shard` when an operator that needs its values reduces it. Throw
/// `c10::ValueError` for an ordinary tensor.
TESSERA_API const DeviceMesh& mesh_of(const at::Tensor& tensor);
TESSERA_API const Placements& placements_of(const at::Tensor& tensor);

/// Returns sizes, dtype, mesh, placements and the sizes of this rank's part, as one line of text
/// for people.
TESSERA_API std::string describe(const at::Tensor& tensor);

/// Prints `describe()` and the values of this rank's part. Sends nothing. (`std::cout << tensor` is
/// LibTorch's: it needs all values in memory, and throws.) Prints an ordinary tensor as LibTorch
/// does.
TESSERA_API std::ostream& print_tensor(std::ostream& stream, const at::Tensor& tensor);

}  // namespace tessera
