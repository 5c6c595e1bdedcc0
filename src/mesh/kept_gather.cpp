#include "mesh/kept_gather.h"

#include <atomic>
#include <unordered_set>
#include <variant>
#include <vector>

namespace tessera {
namespace {

// The families of a thread: a block of numbers that no other thread has. Tensors that another
// thread made are not kept here, as only that thread knows whether they were shown.
class OwnFamilies {
 public:
  int64_t add() { return ++last_; }
  int64_t last() const { return last_; }
  bool has(int64_t family) const { return family > first_ && family <= last_; }

 private:
  static int64_t next_block() {
    static std::atomic<int64_t> blocks = 0;
    return blocks++ * (int64_t{1} << 40);
  }
  const int64_t first_ = next_block();
  int64_t last_ = first_;
};
thread_local OwnFamilies own_families;

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
      all_up_to = own_families.last();
    }
    some.insert(family);
  }
};
thread_local ShownFamilies shown;

struct KeptGather {
  int64_t family = 0;
  int64_t offset = 0;
  uint32_t version = 0;
  std::vector<int64_t> sizes, strides;
  DistSpecPtr from, to;
  at::Tensor part;
};
thread_local KeptGather kept;

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

int64_t new_family() { return own_families.add(); }

void show_family(const DistMeta& meta) {
  if (meta.family <= 0) return;
  shown.add(meta.family);
  if (kept.family == meta.family) kept = {};
}

std::optional<at::Tensor> find_kept_gather(const at::Tensor& tensor, const DistMeta& meta,
                                           const DistSpecPtr& wanted) {
  if (meta.family == 0 || kept.family != meta.family || kept.offset != tensor.storage_offset() ||
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
  kept = {meta.family,
          tensor.storage_offset(),
          version_of(tensor),
          tensor.sizes().vec(),
          tensor.strides().vec(),
          meta.spec,
          wanted,
          part};
}

bool moves_shards(const Placements& from, const Placements& to) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (is_shard(from[i]) && from[i] != to[i] && !is_partial(to[i])) return true;
  }
  return false;
}

}  // namespace tessera
