#include "mesh/kept_gather.h"

#include <atomic>
#include <unordered_set>
#include <variant>
#include <vector>

namespace tessera {
namespace {

// The families of a thread: a block of numbers that no other thread has. Tensors that another
// thread made are not kept here, as only that thread knows whether they were shown.
struct OwnFamilies {
  int64_t before = 0, last = 0;
  bool has(int64_t family) const { return family > before && family <= last; }
};
constinit thread_local OwnFamilies own_families;

int64_t next_block() {
  static std::atomic<int64_t> blocks = 1;
  return blocks++ * (int64_t{1} << 40);
}

// Families whose memory was shown to the user: these, and all up to a number, so that the set stays
// small.
struct ShownFamilies {
  static constexpr size_t kMost = 4096;
  std::unordered_set<int64_t> some;
  int64_t all_up_to = 0;

  bool has(int64_t family) const { return family <= all_up_to || some.contains(family); }
  void add(int64_t family) {
    if (some.size() >= kMost) {
      some.clear();
      all_up_to = own_families.last;
    }
    some.insert(family);
  }
};
thread_local ShownFamilies shown;

struct KeptGather {
  int64_t offset = 0;
  uint32_t version = 0;
  std::vector<int64_t> sizes, strides;
  DistSpecPtr from, to;
  at::Tensor part;
};
thread_local KeptGather kept;
constinit thread_local int64_t kept_family = 0;  // kept.family, at no cost

bool can_keep(const at::Tensor& tensor, const DistMeta& meta) {
  return meta.family > 0 && own_families.has(meta.family) && !shown.has(meta.family) &&
         tensor.unsafeGetTensorImpl()->version_counter().enabled();
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

std::vector<int64_t> reversed(at::IntArrayRef values) { return {values.rbegin(), values.rend()}; }

// The placements of a transposed matrix.
Placements transposed(Placements placements) {
  for (Placement& placement : placements) {
    if (auto* const shard = std::get_if<Shard>(&placement)) shard->dim = 1 - shard->dim;
  }
  return placements;
}

}  // namespace

int64_t new_family() {
  if (own_families.last == 0) own_families.last = own_families.before = next_block();
  return ++own_families.last;
}

void show_family(const DistMeta& meta) {
  if (meta.family <= 0) return;
  shown.add(meta.family);
  if (kept_family != meta.family) return;
  kept = {};
  kept_family = 0;
}

std::optional<at::Tensor> find_kept_gather(const at::Tensor& tensor, const DistMeta& meta,
                                           const DistSpecPtr& wanted) {
  if (meta.family == 0 || kept_family != meta.family || kept.offset != tensor.storage_offset() ||
      kept.version != version_of(tensor))
    return std::nullopt;
  const bool is_same = kept.to == wanted && kept.from == meta.spec &&
                       tensor.sizes() == kept.sizes && tensor.strides() == kept.strides;
  if (is_same) return kept.part;
  const bool is_transposed = tensor.dim() == 2 && reversed(tensor.sizes()) == kept.sizes &&
                             reversed(tensor.strides()) == kept.strides &&
                             kept.to->mesh == wanted->mesh &&
                             transposed(meta.spec->placements) == kept.from->placements &&
                             transposed(wanted->placements) == kept.to->placements;
  return is_transposed ? std::optional(kept.part.t()) : std::nullopt;
}

void keep_gather(const at::Tensor& tensor, const DistMeta& meta, const DistSpecPtr& wanted,
                 const at::Tensor& part) {
  if (!can_keep(tensor, meta) || !moves_shards(meta.spec->placements, wanted->placements)) return;
  kept = {tensor.storage_offset(),
          version_of(tensor),
          tensor.sizes().vec(),
          tensor.strides().vec(),
          meta.spec,
          wanted,
          part};
  kept_family = meta.family;
}

bool moves_shards(const Placements& from, const Placements& to) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (is_shard(from[i]) && from[i] != to[i] && !is_partial(to[i])) return true;
  }
  return false;
}

}  // namespace tessera
