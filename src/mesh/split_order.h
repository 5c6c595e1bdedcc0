#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/placement.h>

#include <cstdint>

namespace tessera {

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
