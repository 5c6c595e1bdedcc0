#include "mesh/split_order.h"

namespace tessera {
namespace {

at::Tensor swapped(const at::Tensor& tensor, int64_t dim, int64_t outer, int64_t inner) {
  const int64_t rest = tensor.size(dim) / (outer * inner);
  return tensor.unflatten(dim, {outer, inner, rest}).transpose(dim, dim + 1).flatten(dim, dim + 2);
}

}  // namespace

at::Tensor in_order_of_ranks(const at::Tensor& whole, const Shard& split, int64_t ranks) {
  return swapped(whole, split.dim, split.split_factor, ranks);
}

at::Tensor in_own_order(const at::Tensor& whole, const Shard& split, int64_t ranks) {
  return swapped(whole, split.dim, ranks, split.split_factor);
}

at::Tensor part_of_blocks(const at::Tensor& whole, const Shard& split, int64_t ranks,
                          int64_t rank) {
  const int64_t rest = whole.size(split.dim) / (split.split_factor * ranks);
  return whole.unflatten(split.dim, {split.split_factor, ranks, rest}).select(split.dim + 1, rank);
}

}  // namespace tessera
