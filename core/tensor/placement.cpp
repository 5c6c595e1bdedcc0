#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/tensor/placement.h>

namespace tessera {
namespace {

// The names, by the number of the `PartialOp`.
constexpr const char* kOpNames[] = {"sum", "avg", "max", "min", "prod", "any", "all", "norm"};

int64_t wrap(int64_t dim, size_t mesh_dim, int64_t tensor_ndim) {
  TORCH_CHECK_VALUE(tensor_ndim > 0,
                    "[normalize] a tensor without dims can't be sharded; got Shard(", dim,
                    ") for mesh dim ", mesh_dim, " and a tensor of 0 dims");
  TORCH_CHECK_VALUE(dim >= -tensor_ndim && dim < tensor_ndim,
                    "[normalize] a Shard must have a dim of the tensor; expected ", -tensor_ndim,
                    " to ", tensor_ndim - 1, ", got Shard(", dim, ") for mesh dim ", mesh_dim,
                    " and a tensor of ", tensor_ndim, " dims");
  return dim < 0 ? dim + tensor_ndim : dim;
}

}  // namespace

std::string to_string(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement))
    return shard->split_factor == 1
               ? fmt::format("Shard({})", shard->dim)
               : fmt::format("Shard({}, split_factor={})", shard->dim, shard->split_factor);
  if (const auto* partial = std::get_if<Partial>(&placement))
    return fmt::format("Partial({})", kOpNames[static_cast<size_t>(partial->op)]);
  return "Replicate";
}

std::string to_string(const Placements& placements) {
  std::string text = "[";
  for (const Placement& placement : placements) {
    if (text.size() > 1) text += ", ";
    text += to_string(placement);
  }
  return text + "]";
}

Placements normalize(Placements placements, int64_t mesh_ndim, int64_t tensor_ndim) {
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(placements.size()) <= mesh_ndim,
      "[normalize] there must be at most one placement for each mesh dim; expected up to ",
      mesh_ndim, ", got ", placements.size(), ": ", to_string(placements));
  for (size_t i = 0; i < placements.size(); ++i) {
    auto* const shard = std::get_if<Shard>(&placements[i]);
    if (!shard) continue;
    shard->dim = wrap(shard->dim, i, tensor_ndim);
    TORCH_CHECK_VALUE(shard->split_factor >= 1,
                      "[normalize] the split factor of a Shard must be at least 1; got ",
                      to_string(*shard), " for mesh dim ", i);
  }
  placements.resize(mesh_ndim, Replicate{});
  return placements;
}

}  // namespace tessera
