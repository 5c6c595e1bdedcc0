#include "checkpoint/dist_part.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "mesh/chunks.h"

namespace tessera {
namespace {

// Returns a shape in which a dim that is first cut into blocks is two dims: blocks, and rows of a
// block. `dims`: the index in it of each dim of the tensor; for two dims, that of the rows.
std::vector<int64_t> shape_of_blocks(const DistSpec& spec, at::IntArrayRef sizes,
                                     std::vector<int64_t>& dims) {
  std::vector<int64_t> factors(sizes.size(), 1), shape;
  for (const Placement& placement : spec.placements) {
    if (is_split(placement))
      factors[std::get<Shard>(placement).dim] = std::get<Shard>(placement).split_factor;
  }
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (factors[dim] > 1) shape.push_back(factors[dim]);
    dims.push_back(static_cast<int64_t>(shape.size()));
    shape.push_back(sizes[dim] / factors[dim]);
  }
  return shape;
}

}  // namespace

Region part_of(const DistSpec& spec, at::IntArrayRef sizes, const std::string& name) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      std::none_of(spec.placements.begin(), spec.placements.end(), is_partial),
      "[checkpoint] '", name, "' is ", to_string(spec.placements),
      ": what ranks have are terms of its values. redistribute() it to Replicate or Shard first");
  if (!spec.mesh.is_member()) return {};
  if (std::all_of(spec.placements.begin(), spec.placements.end(), is_replicate))
    return {0, c10::multiply_integers(sizes)};
  std::vector<int64_t> dims;
  Box box{.shape = shape_of_blocks(spec, sizes, dims), .offset = {}, .sizes = {}};
  Placements placements = without_splits(spec.placements);
  for (Placement& placement : placements) {
    if (auto* shard = std::get_if<Shard>(&placement)) shard->dim = dims[shard->dim];
  }
  for (const Range& range :
       local_box(box.shape, placements, spec.mesh.shape(), *spec.mesh.coordinate())) {
    box.offset.push_back(range.begin);
    box.sizes.push_back(range.size());
  }
  const int64_t numel = box.numel();
  return numel == 0 ? Region{} : Region{0, numel, std::move(box)};
}

int64_t ReplicaTurns::next(int64_t replicas, int64_t nbytes) {
  LeastLoaded& ranks = stored_.try_emplace(replicas, static_cast<int>(replicas)).first->second;
  const int rank = ranks.next();
  ranks.add(rank, nbytes);
  return rank;
}

Replica replica_of(const DistSpec& spec) {
  Replica replica;
  for (int64_t dim = 0; dim < spec.mesh.ndim(); ++dim) {
    if (!is_replicate(spec.placements[dim])) continue;
    replica.count *= spec.mesh.size(dim);
    replica.index = replica.index * spec.mesh.size(dim) +
                    (spec.mesh.is_member() ? (*spec.mesh.coordinate())[dim] : 0);
  }
  return replica;
}

}  // namespace tessera
