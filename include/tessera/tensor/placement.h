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

/// The tensor is sharded along its dim `dim` over the ranks of the mesh dim, as `torch::chunk`
/// cuts: of n elements over k ranks, each of the first ranks gets ceil(n / k), the last one that
/// gets any gets the rest, and the ranks behind it get none.
///
/// With a `split_factor` f above 1 the dim is first cut into f equal blocks, and each block over
/// the ranks: a rank has its part of every block, one after the other. So if the rows of one weight
/// are those of q, k and v, `Shard{0, 3}` gives each rank its heads of all three. The dim's size
/// must be a multiple of f times the number of ranks, and no other mesh dim may shard it.
struct Shard {
  /// A negative value counts from the end; see `normalize()`.
  int64_t dim = 0;
  int64_t split_factor = 1;
  bool operator==(const Shard&) const = default;
};

/// How the terms of a `Partial` are combined. `kNorm`: the square root of the sum of their squares,
/// for terms that are not negative, as the norms of parts give the norm of the whole.
enum class PartialOp : uint8_t { kSum, kAvg, kMax, kMin, kProd, kAny, kAll, kNorm };

/// Each rank of the mesh dim has one term of a pending reduction.
struct Partial {
  PartialOp op = PartialOp::kSum;
  bool operator==(const Partial&) const = default;
};

/// How a tensor is placed on one dim of a `DeviceMesh`.
using Placement = std::variant<Replicate, Shard, Partial>;

/// One placement for each mesh dim, in order. Mesh dims that shard the same tensor dim cut it one
/// after the other: the first cuts the tensor, the second the parts of the first.
using Placements = std::vector<Placement>;

inline bool is_replicate(const Placement& p) { return std::holds_alternative<Replicate>(p); }
inline bool is_shard(const Placement& p) { return std::holds_alternative<Shard>(p); }
/// True for a `Shard` of `dim`, with any split factor.
inline bool is_shard(const Placement& p, int64_t dim) {
  return is_shard(p) && std::get<Shard>(p).dim == dim;
}
/// True for a `Shard` with a split factor above 1.
inline bool is_split(const Placement& p) {
  return is_shard(p) && std::get<Shard>(p).split_factor > 1;
}
inline bool is_partial(const Placement& p) { return std::holds_alternative<Partial>(p); }

/// Returns "Shard(0)", "Shard(0, split_factor=3)", "Replicate" or "Partial(sum)", for example.
TESSERA_API std::string to_string(const Placement& placement);
/// Returns "[Shard(0), Replicate]", for example.
TESSERA_API std::string to_string(const Placements& placements);

/// Returns `placements` completed for `mesh_ndim` mesh dims and a tensor of `tensor_ndim` dims:
/// missing placements become `Replicate`, negative dims of `Shard` are counted from the end.
///
/// Throws `c10::ValueError` for more placements than mesh dims, for a `Shard` of a dim that the
/// tensor does not have, and for a split factor below 1.
TESSERA_API Placements normalize(Placements placements, int64_t mesh_ndim, int64_t tensor_ndim);

}  // namespace tessera
