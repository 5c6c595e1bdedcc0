#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "support/sim_device/memory.h"
#include "support/sim_device/streams.h"

namespace tessera::testing::sim {
namespace {

struct PinnedBlock {
  size_t bytes = 0;
  std::vector<MarkPtr> used_until;
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    constexpr size_t kAlignment = 4096;
    void* const data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) & -kAlignment);
    TORCH_CHECK_WITH(OutOfMemoryError, data, "[sim] no host memory: ", bytes, " bytes");
    std::memset(data, kPoison, bytes);
    std::lock_guard lock(mutex_);
    collect();
    blocks_[data].bytes = bytes;
    return {data, data, [](void* block) { instance().release(block); }, c10::kCPU};
  }

  bool record_event(void* address, void* /*context*/, c10::Stream stream) override {
    MarkPtr mark = queue_of(stream).mark();
    std::lock_guard lock(mutex_);
    PinnedBlock* const block = find(address);
    if (block) block->used_until.push_back(std::move(mark));
    return block != nullptr;
  }

  bool contains(const void* address) {
    std::lock_guard lock(mutex_);
    return find(address) != nullptr;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* block) { instance().release(block); };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  static PinnedAllocator& instance() {
    static auto& allocator = *new PinnedAllocator;
    return allocator;
  }

 private:
  using Blocks = std::map<const void*, PinnedBlock>;

  void release(void* data) {
    std::lock_guard lock(mutex_);
    released_.emplace_back(data, std::move(blocks_.at(data)));
    blocks_.erase(data);
    collect();
  }

  void collect() {
    std::erase_if(released_, [](auto& released) {
      for (const MarkPtr& mark : released.second.used_until)
        if (!mark->is_reached()) return false;
      std::memset(released.first, kPoison, released.second.bytes);
      std::free(released.first);
      return true;
    });
  }

  PinnedBlock* find(const void* address) {
    auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return nullptr;
    auto& [begin, block] = *std::prev(after);
    const auto offset = static_cast<const char*>(address) - static_cast<const char*>(begin);
    return offset < static_cast<ptrdiff_t>(block.bytes) ? &block : nullptr;
  }

  std::mutex mutex_;
  Blocks blocks_;
  std::vector<std::pair<void*, PinnedBlock>> released_;
};

}  // namespace

at::HostAllocator& pinned_allocator() { return PinnedAllocator::instance(); }
bool is_pinned(const void* address) { return PinnedAllocator::instance().contains(address); }

}  // namespace tessera::testing::sim
