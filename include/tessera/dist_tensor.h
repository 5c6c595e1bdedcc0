#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/device_mesh.h>
#include <tessera/export.h>
#include <tessera/placement.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

// A *DistTensor* is an `at::Tensor` that stands for a global tensor of which each rank of a device
// mesh holds a part. It has the global sizes, dtype and values: operators on it give what they
// would give on the whole tensor in one process, and `backward()` and `torch::optim` work on it. It
// has no memory of its own: `data_ptr()`, `storage()` and so `torch::save()` throw, naming what to
// call in their place.
//
// Operators are collective over the mesh: all its ranks call the same ones in the same order.
//
//     auto mesh = tessera::DeviceMesh::over_world();
//     auto weight = tessera::distribute(torch::randn({8, 6}), mesh, {tessera::Shard{0}});
//     auto product = torch::mm(input, weight.t());             // local matrix product
//     auto whole = tessera::full_tensor(product);              // an ordinary tensor, on every rank

/// Whether `tensor` is a DistTensor.
TESSERA_API bool is_dist(const at::Tensor& tensor);

/// Spreads `tensor`, whose values must be the same on all ranks, over `mesh`: each rank keeps its
/// part, and nothing is sent. Missing placements are `Replicate`.
///
/// Of `Partial(sum)` the first rank of the mesh dim gets the values and the others zeros, so that
/// they add up to `tensor`. The parts are copies, except that a replicated tensor is kept as it is.
/// A leaf that requires a gradient gives a leaf that does; of other tensors gradients flow back.
/// A rank that is not in `mesh` gets a DistTensor without elements of its own.
/// Throws `c10::ValueError` for more placements than the mesh has dims, and for a `Shard` dim that
/// the tensor does not have.
TESSERA_API at::Tensor distribute(const at::Tensor& tensor, const DeviceMesh& mesh,
                                  Placements placements);

/// Makes `tensor` itself a DistTensor with these placements: a parameter or a buffer that a module
/// holds, so that the module computes with it from then on. A DistTensor gets the placements.
///
/// As `distribute()` it needs equal values on all ranks and sends nothing, unless `tensor` is a
/// DistTensor. Gradients are dropped. Gradients to come have the parameter's placements.
/// Throws `c10::ValueError` for a tensor that is neither a leaf nor free of autograd.
TESSERA_API void distribute_(const at::Tensor& tensor, const DeviceMesh& mesh,
                             Placements placements);

/// Makes a DistTensor of the parts that the ranks of `mesh` have; nothing is sent or checked.
///
/// `sizes` are the global ones; left out, all parts are taken to be of equal size. Throws
/// `c10::ValueError` if this rank's part does not have the size that its place asks for.
/// Differentiable: the gradient of `local` is this rank's part of the gradient.
TESSERA_API at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                  Placements placements,
                                  std::optional<std::vector<int64_t>> sizes = std::nullopt);

/// This rank's part, which shares memory with the DistTensor. Differentiable: gradients of it have
/// the placements of `tensor`, those of `Partial` ones are replicated. A `Partial` result of an
/// operator shares it until an operator reduces it.
/// Throws `c10::ValueError` for an ordinary tensor.
TESSERA_API at::Tensor to_local(const at::Tensor& tensor);

/// The same global tensor with other placements; differentiable, and never changes `tensor`.
///
/// Collective over the mesh. Sends as little as it can: from `Replicate` nothing, from `Partial` to
/// `Shard` a reduce-scatter, from `Shard` to `Shard` of another dim an all-to-all.
TESSERA_API at::Tensor redistribute(const at::Tensor& tensor, Placements placements);

/// The same on another mesh. Collective over the ranks of both meshes.
TESSERA_API at::Tensor redistribute(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    Placements placements);

/// The global values as an ordinary tensor, on every rank of the mesh. Collective; differentiable.
TESSERA_API at::Tensor full_tensor(const at::Tensor& tensor);

/// Where `tensor` lies. A `Partial` result of an operator may become `Replicate` or `Shard` when an
/// operator that needs its values reduces it. Throw `c10::ValueError` for an ordinary tensor.
TESSERA_API const DeviceMesh& mesh_of(const at::Tensor& tensor);
TESSERA_API const Placements& placements_of(const at::Tensor& tensor);

/// Sizes, dtype, mesh, placements and what this rank has, as one line of text, for people.
TESSERA_API std::string describe(const at::Tensor& tensor);

/// Prints `describe()` and the values that this rank has. Sends nothing. (`std::cout << tensor` is
/// LibTorch's, which wants all values in memory, and throws.) An ordinary tensor is printed as
/// LibTorch does.
TESSERA_API std::ostream& print_tensor(std::ostream& stream, const at::Tensor& tensor);

}  // namespace tessera
