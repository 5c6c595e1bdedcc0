#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/placement.h>

#include <cstdint>

namespace tessera {

// [Note: Split placements]
//
// Let a dim have f * k * m elements. If it is seen as [f, k, m] and the first two are swapped, the
// elements of each of k ranks lie together: Shard{d, f} of a tensor is Shard{d} of that one. So a
// tensor that gets split is put in that order before it is cut, and one that was split is put back
// in its own order where it is whole again.

/// The tensor whose plain parts along `split.dim` are the split parts of `whole`.
at::Tensor in_order_of_ranks(const at::Tensor& whole, const Shard& split, int64_t ranks);

/// The way back.
at::Tensor in_own_order(const at::Tensor& whole, const Shard& split, int64_t ranks);

/// A view of the split part of `rank`, with a dim of the blocks before that of the elements.
at::Tensor part_of_blocks(const at::Tensor& whole, const Shard& split, int64_t ranks, int64_t rank);

}  // namespace tessera
