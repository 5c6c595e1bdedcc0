#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/tensor/placement.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// Indices of a tensor dim, `begin` to `end - 1`.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// Returns part `index` of `size` elements that are cut into `parts` parts as `torch::chunk` cuts,
/// but always into `parts` parts, of which the last may be empty. An empty part lies at the end.
Range chunk(int64_t size, int64_t parts, int64_t index);

/// Returns the part of a tensor of `global_sizes` that the rank at `coordinate` of a mesh has: a
/// range for each tensor dim. `placements` must be normalized, and none may be split, as the part
/// would consist of several ranges.
std::vector<Range> local_box(c10::IntArrayRef global_sizes, const Placements& placements,
                             c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate);

/// Returns the sizes of the rank's part along each dim; placements may be split.
std::vector<int64_t> local_sizes(c10::IntArrayRef global_sizes, const Placements& placements,
                                 c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate);

/// Returns `placements` with split factors of 1.
Placements without_splits(Placements placements);

// [Note: Split placements]
//
// Let a dim have f * k * m elements. If it is viewed as [f, k, m] and the first two are swapped,
// the elements of each of the k ranks are adjacent: Shard{d, f} of a tensor is Shard{d} of the
// reordered one. So a tensor is put in that order before it is split, and a split tensor is put
// back in its own order when it is whole again.

/// Returns the tensor whose plain parts along `split.dim` are the split parts of `whole`.
at::Tensor in_order_of_ranks(const at::Tensor& whole, const Shard& split, int64_t ranks);

/// The inverse of that.
at::Tensor in_own_order(const at::Tensor& whole, const Shard& split, int64_t ranks);

/// Returns a view of the split part of `rank`, with a dim of blocks before the dim of elements.
at::Tensor part_of_blocks(const at::Tensor& whole, const Shard& split, int64_t ranks, int64_t rank);

}  // namespace tessera
