#include "mesh/kept_gather.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

namespace tessera {
namespace {

// The families that a thread makes are a block of numbers that no other thread has: the backward of
// a device runs on a thread of its own, which reads results of others.
constexpr int64_t kBlock = int64_t{1} << 40;
constinit thread_local int64_t last_family = 0;

int64_t next_block() {
  static std::atomic<int64_t> blocks = 1;
  return blocks++ * kBlock;
}

// Families whose memory was shown to the user, of all threads. Of a block: these, and all up to a
// number, so that the set stays small.
class ShownFamilies {
 public:
  bool has(int64_t family) {
    const std::lock_guard lock(mutex_);
    const Block& block = blocks_[family / kBlock];
    return family <= block.all_up_to || block.some.contains(family);
  }
  void add(int64_t family) {
    const std::lock_guard lock(mutex_);
    Block& block = blocks_[family / kBlock];
    block.some.insert(family);
    if (block.some.size() < kMost) return;
    block.all_up_to = std::ranges::max(block.some);
    block.some.clear();
  }

 private:
  static constexpr size_t kMost = 4096;
  struct Block {
    std::unordered_set<int64_t> some;
    int64_t all_up_to = 0;
  };
  std::mutex mutex_;
  std::unordered_map<int64_t, Block> blocks_;
};

ShownFamilies& shown() {
  static auto* const families = new ShownFamilies();
  return *families;
}

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
  return meta.family > 0 && !shown().has(meta.family) &&
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
  if (last_family == 0) last_family = next_block();
  return ++last_family;
}

void show_family(const DistMeta& meta) {
  if (meta.family <= 0) return;
  shown().add(meta.family);
}

std::optional<at::Tensor> find_kept_gather(const at::Tensor& tensor, const DistMeta& meta,
                                           const DistSpecPtr& wanted) {
  if (meta.family == 0 || kept_family != meta.family || kept.offset != tensor.storage_offset() ||
      kept.version != version_of(tensor) || shown().has(meta.family))
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
