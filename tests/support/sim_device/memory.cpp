#include "support/sim_device/memory.h"

#include <c10/core/Storage.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "support/sim_device/streams.h"

namespace tessera::testing::sim {
namespace {

constexpr size_t kDeviceBytes = kNoLimit;
constexpr size_t kAllBytes = kDeviceBytes * kDeviceCount;
constexpr size_t kSmallestBlock = 512;

// The memory of all devices, mapped twice: the first mapping, whose addresses tensors show, cannot
// be read or written; the second lies directly behind it.
char* map_memory() {
  const int file = memfd_create("sim_device", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, kAllBytes) == 0, "[sim] no memory file: errno ", errno);
  constexpr int kFlags = MAP_SHARED | MAP_NORESERVE;
  // Reserves both ranges first, so that they are neighbours.
  void* const both =
      mmap(nullptr, 2 * kAllBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(both != MAP_FAILED, "[sim] no address space: errno ", errno);
  char* const shown = static_cast<char*>(both);
  void* const first = mmap(shown, kAllBytes, PROT_NONE, kFlags | MAP_FIXED, file, 0);
  void* const second =
      mmap(shown + kAllBytes, kAllBytes, PROT_READ | PROT_WRITE, kFlags | MAP_FIXED, file, 0);
  TORCH_CHECK(first != MAP_FAILED && second != MAP_FAILED, "[sim] no mapping: errno ", errno);
  madvise(second, kAllBytes, MADV_DONTDUMP);
  close(file);
  return shown;
}

char* shown_memory() {
  static char* const shown = map_memory();
  return shown;
}

struct Block {
  StreamQueue* queue;  // of the stream that it belongs to
  char* data;
  size_t capacity;
  size_t bytes = 0;                 // asked for; 0: free
  std::vector<StreamQueue*> users;  // other streams, by record_stream()
  std::vector<MarkPtr> used_until;  // after its release: the ends of their uses
};

void poison(char* data, size_t bytes) { std::memset(alias_of(data), kPoison, bytes); }

class Pool {
 public:
  explicit Pool(int device) : device_(device), next_(shown_memory() + device * kDeviceBytes) {}

  void* allocate(size_t bytes) {
    StreamQueue& queue = current_queue(device_);
    std::unique_lock lock(mutex_);
    collect();
    if (!has_room(bytes)) {
      // As CUDA's: waits for the other users of released blocks.
      const auto marks = pending_marks();
      lock.unlock();
      for (const MarkPtr& mark : marks) mark->wait();
      lock.lock();
      collect();
      TORCH_CHECK_WITH(OutOfMemoryError, has_room(bytes), "sim out of memory. Tried to allocate ",
                       bytes, " bytes on sim:", device_, "; of ", limit_, " bytes ", count_.held,
                       " are in use");
    }
    Block& block = free_block(queue, std::bit_ceil(std::max(bytes, kSmallestBlock)));
    block.bytes = bytes;
    count_.live += static_cast<int64_t>(bytes);
    count_.held += static_cast<int64_t>(bytes);
    count_.peak = std::max(count_.peak, count_.held);
    count_.allocated += static_cast<int64_t>(bytes);
    ++count_.allocations;
    return block.data;
  }

  void release(void* data) {
    std::lock_guard lock(mutex_);
    Block& block = blocks_.at(data);
    count_.live -= static_cast<int64_t>(block.bytes);
    for (StreamQueue* user : std::exchange(block.users, {}))
      block.used_until.push_back(user->mark());
    pending_.push_back(&block);
    collect();
  }

  void record(void* data, StreamQueue& queue) {
    std::lock_guard lock(mutex_);
    Block& block = blocks_.at(data);
    const bool is_known = std::ranges::find(block.users, &queue) != block.users.end();
    if (&queue != block.queue && !is_known) block.users.push_back(&queue);
  }

  MemoryCount count() {
    std::lock_guard lock(mutex_);
    collect();
    return count_;
  }
  void reset_peak() {
    std::lock_guard lock(mutex_);
    count_.peak = count_.held;
  }
  void set_limit(int64_t bytes) {
    std::lock_guard lock(mutex_);
    limit_ = bytes;
  }
  int64_t limit() const {
    std::lock_guard lock(mutex_);
    return limit_;
  }

 private:
  bool has_room(size_t bytes) const { return count_.held + static_cast<int64_t>(bytes) <= limit_; }

  std::vector<MarkPtr> pending_marks() const {
    std::vector<MarkPtr> marks;
    for (const Block* block : pending_)
      marks.insert(marks.end(), block->used_until.begin(), block->used_until.end());
    return marks;
  }

  // Frees the released blocks that no other stream uses any more.
  void collect() {
    std::erase_if(pending_, [&](Block* block) {
      for (const MarkPtr& mark : block->used_until)
        if (!mark->is_reached()) return false;
      block->used_until.clear();
      block->queue->push("poison",
                         [data = block->data, bytes = block->bytes] { poison(data, bytes); });
      count_.held -= static_cast<int64_t>(std::exchange(block->bytes, 0));
      free_[{block->queue, block->capacity}].push_back(block);
      return true;
    });
  }

  Block& free_block(StreamQueue& queue, size_t capacity) {
    auto& blocks = free_[{&queue, capacity}];
    if (!blocks.empty()) {
      Block& block = *blocks.back();
      blocks.pop_back();
      return block;
    }
    const size_t used = next_ - (shown_memory() + device_ * kDeviceBytes);
    TORCH_CHECK_WITH(OutOfMemoryError, used + capacity <= kDeviceBytes,
                     "sim out of memory: no address space on sim:", device_);
    poison(next_, capacity);
    Block& block = blocks_.emplace(next_, Block{&queue, next_, capacity}).first->second;
    next_ += capacity;
    return block;
  }

  const int device_;
  mutable std::mutex mutex_;
  char* next_;
  std::unordered_map<void*, Block> blocks_;
  std::map<std::pair<StreamQueue*, size_t>, std::vector<Block*>> free_;
  std::vector<Block*> pending_;  // released, but still used by other streams
  MemoryCount count_;
  int64_t limit_ = kNoLimit;
};

Pool& pool_of(int device) {
  static auto& pools = *new std::array<Pool, kDeviceCount>{Pool(0), Pool(1), Pool(2), Pool(3),
                                                           Pool(4), Pool(5), Pool(6), Pool(7)};
  return pools.at(device);
}

void release_memory(void* data) {
  if (data) pool_of(device_of_address(data)).release(data);
}

class SimAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    void* const data = bytes == 0 ? nullptr : pool_of(device).allocate(bytes);
    return {data, data, &release_memory, sim::device(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    current_queue(device_of_address(to)).push("copy data", [=] {
      std::memcpy(alias_of(to), alias_of(from), bytes);
    });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}  // the limit does not count free blocks
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() && data.get_deleter() == &release_memory)
      pool_of(device_of_address(data.get())).record(data.get(), queue_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryCount count = pool_of(device).count();
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& live = stats.allocated_bytes[0];
    live.current = count.live;
    live.allocated = count.allocated;
    live.freed = count.allocated - count.live;
    for (auto* held : {&stats.active_bytes[0], &stats.reserved_bytes[0]}) {
      held->current = count.held;
      held->peak = count.peak;
    }
    live.peak = count.peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override { pool_of(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const int64_t limit = pool_of(device).limit();
    return {limit - pool_of(device).count().held, limit};
  }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto& allocator = *new SimAllocator;
  return allocator;
}

void* alias_of(const void* address) {
  if (!address) return nullptr;
  TORCH_INTERNAL_ASSERT(device_of_address(address) >= 0);
  return const_cast<char*>(static_cast<const char*>(address)) + kAllBytes;
}

int device_of_address(const void* address) {
  const auto offset = static_cast<const char*>(address) - shown_memory();
  if (!address || offset < 0 || offset >= static_cast<ptrdiff_t>(kAllBytes)) return -1;
  return static_cast<int>(offset / kDeviceBytes);
}

const void* peek(const void* data) { return alias_of(data); }
MemoryCount memory(const c10::Device& device) { return pool_of(device.index()).count(); }
void reset_peak(const c10::Device& device) { pool_of(device.index()).reset_peak(); }
void set_memory_limit(const c10::Device& device, int64_t bytes) {
  pool_of(device.index()).set_limit(bytes);
}

}  // namespace tessera::testing::sim
