#include "mesh/list_norm.h"

#include <ATen/ops/stack.h>

#include <cmath>
#include <cstdint>

namespace tessera {
namespace {

// Tensors whose norms are reduced over the same ranks.
struct Family {
  const DeviceMesh* mesh;
  std::vector<bool> is_cut;  // by mesh dim
  std::vector<size_t> members;
};

std::vector<bool> cut_dims(const DistSpec& spec) {
  std::vector<bool> is_cut;
  for (int64_t d = 0; d < spec.mesh.ndim(); ++d)
    is_cut.push_back(is_shard(spec.placements[d]) && spec.mesh.size(d) > 1);
  return is_cut;
}

std::vector<Family> families_of(const std::vector<DistSpecPtr>& specs) {
  std::vector<Family> families;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i]) continue;
    const auto is_cut = cut_dims(*specs[i]);
    Family* own = nullptr;
    for (Family& family : families) {
      if (*family.mesh == specs[i]->mesh && family.is_cut == is_cut) own = &family;
    }
    if (!own) own = &families.emplace_back(Family{&specs[i]->mesh, is_cut, {}});
    own->members.push_back(i);
  }
  return families;
}

// |a, b| = (|a|^p + |b|^p)^(1/p); order 0: the number of elements; infinite order: the largest.
void combine(const Family& family, std::vector<at::Tensor>& norms, double order) {
  std::vector<at::Tensor> own;
  for (const size_t i : family.members) own.push_back(norms[i].to(at::kDouble));
  const bool is_largest = std::isinf(order), has_root = !is_largest && order != 0;
  at::Tensor terms = at::stack(own);
  if (has_root) terms = terms.pow(order);
  bool is_sent = false;
  for (size_t d = 0; d < family.is_cut.size(); ++d) {
    if (!family.is_cut[d]) continue;
    is_sent = true;
    family.mesh->process_group(static_cast<int64_t>(d))
        ->all_reduce(terms, is_largest ? ReduceOp::kMax : ReduceOp::kSum, {"norms of a list"})
        ->wait();
  }
  if (!is_sent) return;
  if (has_root) terms = terms.pow(1 / order);
  for (size_t i = 0; i < family.members.size(); ++i) {
    at::Tensor& norm = norms[family.members[i]];
    norm = terms.select(0, static_cast<int64_t>(i)).to(norm.scalar_type()).clone();
  }
}

}  // namespace

std::vector<at::Tensor> global_norms(std::vector<at::Tensor> norms,
                                     const std::vector<DistSpecPtr>& specs, double order) {
  for (const Family& family : families_of(specs)) combine(family, norms, order);
  return norms;
}

}  // namespace tessera
