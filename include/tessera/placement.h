#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace tessera {

/// Every rank of the mesh dim has the same values.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

/// The tensor is cut along its dim `dim` over the ranks of the mesh dim, as `torch::chunk` cuts:
/// of n elements over k ranks, ceil(n / k) go to each of the front ranks, the rest to the last one
/// that gets any, and nothing to those behind it.
///
/// With a `split_factor` f above 1 the dim is first cut into f equal blocks, and each block over
/// the ranks: a rank has its part of every block, one after the other. So each rank has its heads
/// of q, of k and of v if the rows of one weight are those of all three: `Shard{0, 3}`. The dim's
/// size must be a multiple of f times the ranks, and no other mesh dim may shard it.
struct Shard {
  /// A negative one counts from the end; see `normalize()`.
  int64_t dim = 0;
  int64_t split_factor = 1;
  bool operator==(const Shard&) const = default;
};

/// How the terms of a `Partial` become values. `kNorm`: terms that are not negative become the
/// square root of the sum of their squares, as the norms of parts become the norm of the whole.
enum class PartialOp : uint8_t { kSum, kAvg, kMax, kMin, kProd, kAny, kAll, kNorm };

/// Each rank of the mesh dim has one term of a reduction that is still to be done.
struct Partial {
  PartialOp op = PartialOp::kSum;
  bool operator==(const Partial&) const = default;
};

/// How a tensor lies on one dim of a `DeviceMesh`.
using Placement = std::variant<Replicate, Shard, Partial>;

/// One placement for each mesh dim, in their order. Mesh dims that shard the same tensor dim cut it
/// one after the other: the first cuts the tensor, the second what the first left to a rank.
using Placements = std::vector<Placement>;

inline bool is_replicate(const Placement& p) { return std::holds_alternative<Replicate>(p); }
inline bool is_shard(const Placement& p) { return std::holds_alternative<Shard>(p); }
/// Whatever the split factor.
inline bool is_shard(const Placement& p, int64_t dim) {
  return is_shard(p) && std::get<Shard>(p).dim == dim;
}
/// A `Shard` with a split factor above 1.
inline bool is_split(const Placement& p) {
  return is_shard(p) && std::get<Shard>(p).split_factor > 1;
}
inline bool is_partial(const Placement& p) { return std::holds_alternative<Partial>(p); }

/// "Shard(0)", "Shard(0, split_factor=3)", "Replicate", "Partial(sum)".
TESSERA_API std::string to_string(const Placement& placement);
/// "[Shard(0), Replicate]".
TESSERA_API std::string to_string(const Placements& placements);

/// `placements` for each of `mesh_ndim` mesh dims and a tensor of `tensor_ndim` dims: mesh dims
/// that none is given for become `Replicate`, negative dims of `Shard` are counted from the end.
///
/// Throws `c10::ValueError` for more placements than mesh dims, for a `Shard` of a dim that the
/// tensor does not have, and for a split factor below 1.
TESSERA_API Placements normalize(Placements placements, int64_t mesh_ndim, int64_t tensor_ndim);

}  // namespace tessera
