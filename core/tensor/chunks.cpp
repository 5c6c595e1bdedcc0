#include "tensor/chunks.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera {
namespace {

at::Tensor swapped(const at::Tensor& tensor, int64_t dim, int64_t outer, int64_t inner) {
  const int64_t rest = tensor.size(dim) / (outer * inner);
  return tensor.unflatten(dim, {outer, inner, rest}).transpose(dim, dim + 1).flatten(dim, dim + 2);
}

}  // namespace

Range chunk(int64_t size, int64_t parts, int64_t index) {
  TORCH_INTERNAL_ASSERT(size >= 0 && index >= 0 && index < parts, "part ", index, " of ", parts,
                        " of ", size, " elements");
  const int64_t rows = size / parts + (size % parts != 0);
  const int64_t begin = std::min(index * rows, size);
  return {begin, std::min(begin + rows, size)};
}

std::vector<Range> local_box(c10::IntArrayRef global_sizes, const Placements& placements,
                             c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate) {
  TORCH_INTERNAL_ASSERT(
      placements.size() == mesh_shape.size() && placements.size() == coordinate.size(),
      to_string(placements), " on a mesh of ", mesh_shape, " at ", coordinate);
  std::vector<Range> box;
  box.reserve(global_sizes.size());
  for (const int64_t size : global_sizes) box.push_back({0, size});
  for (size_t i = 0; i < placements.size(); ++i) {
    const auto* shard = std::get_if<Shard>(&placements[i]);
    if (!shard) continue;
    TORCH_INTERNAL_ASSERT(shard->dim >= 0 && shard->dim < static_cast<int64_t>(box.size()) &&
                              shard->split_factor == 1,
                          to_string(placements), " of a tensor of ", global_sizes);
    Range& range = box[shard->dim];
    const Range part = chunk(range.size(), mesh_shape[i], coordinate[i]);
    range = {range.begin + part.begin, range.begin + part.end};
  }
  return box;
}

std::vector<int64_t> local_sizes(c10::IntArrayRef global_sizes, const Placements& placements,
                                 c10::IntArrayRef mesh_shape, c10::IntArrayRef coordinate) {
  // A part of a split dim is as large as without the split: the split divides it evenly.
  std::vector<int64_t> sizes;
  sizes.reserve(global_sizes.size());
  for (const Range& range :
       local_box(global_sizes, without_splits(placements), mesh_shape, coordinate))
    sizes.push_back(range.size());
  return sizes;
}

Placements without_splits(Placements placements) {
  for (Placement& placement : placements) {
    if (auto* const shard = std::get_if<Shard>(&placement)) shard->split_factor = 1;
  }
  return placements;
}

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
