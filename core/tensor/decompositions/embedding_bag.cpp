#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "base/dispatch/dry_run.h"
#include "base/dispatch/each_tensor.h"
#include "tensor/decompositions.h"
#include "tensor/dist_meta.h"
#include "tensor/placed.h"

namespace tessera {
namespace {

// For a weight that is cut by columns: each rank has those columns of the bags. There is no rule,
// because only the kernel knows the sizes of the results that the backward needs.
bool by_columns(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor weight = call.tensor("weight");
  const DistMeta* const meta = find_dist_meta(weight);
  const auto fits = [](const Placement& placement) {
    return is_replicate(placement) || is_shard(placement, 1);
  };
  if (!meta || !std::ranges::all_of(meta->spec->placements, fits)) return false;
  const DistSpecPtr columns = meta->spec, whole = intern(columns->mesh, replicated(columns->mesh));
  torch::jit::Stack local;
  for (const c10::IValue& argument : call.values)
    local.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
      return placed(tensor, tensor.is_same(weight) ? *columns : *whole, op.schema().name());
    }));
  if (columns->mesh.is_member()) {
    op.callBoxed(local);
  } else {
    local = run_on_constants(op, call.values);
  }
  // The last result is, for a maximum, the row that each column of a bag takes.
  constexpr int64_t kMax = 2;
  const bool is_maximum = call.argument("mode").toInt() == kMax;
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < local.size(); ++i) {
    const at::Tensor part = local[i].toTensor();
    const bool is_cut = i == 0 || (is_maximum && i + 1 == local.size());
    std::vector<int64_t> sizes = part.sizes().vec();
    if (is_cut) sizes[1] = weight.size(1);
    const at::Tensor own =
        columns->mesh.is_member() ? part : at::empty({0}, weight.options().dtype(part.dtype()));
    results.push_back(make_dist(own, is_cut ? columns : whole, sizes));
  }
  return finish(op, stack, results);
}

constexpr DecompositionEntry kEmbeddingBags[] = {
    {"_embedding_bag", by_columns},
    {"_embedding_bag_forward_only", by_columns},
};

}  // namespace

std::span<const DecompositionEntry> embedding_bag_decompositions() { return kEmbeddingBags; }

}  // namespace tessera
