#include "memory/live_bytes.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/tensor_allocator.h"

namespace tessera {

std::atomic<bool> counting_live_bytes = false;

namespace {

// Returns the number of the calling thread, from 1; numbers are never reused.
uint64_t thread_number() {
  static std::atomic<uint64_t> last = 0;
  thread_local const uint64_t number = ++last;
  return number;
}

}  // namespace

/// The active counters, and the blocks that were allocated while there are any.
class LiveBlocks {
 public:
  // Never destroyed: tensors in static variables may be destroyed last.
  static LiveBlocks& instance() {
    static auto* const blocks = [] {
      const auto lock = [] { instance().mutex.lock(); };
      const auto unlock = [] { instance().mutex.unlock(); };
      ::pthread_atfork(lock, unlock, unlock);
      return new LiveBlocks();
    }();
    return *blocks;
  }

  void add(LiveBytes* counter) {
    std::lock_guard lock(mutex);
    counters_.push_back(counter);
    counting_live_bytes = true;
  }

  void remove(const LiveBytes* counter) {
    std::lock_guard lock(mutex);
    std::erase(counters_, counter);
    if (!counters_.empty()) return;
    counting_live_bytes = false;
    blocks_.clear();
  }

  void taken(const void* data, size_t nbytes) {
    std::lock_guard lock(mutex);
    if (counters_.empty()) return;
    const Block block{static_cast<int64_t>(nbytes), thread_number()};
    blocks_.insert_or_assign(data, block);
    change(block.thread, block.nbytes);
  }

  void freed(const void* data, size_t block_bytes) {
    std::lock_guard lock(mutex);
    const auto block = blocks_.find(data);
    if (block == blocks_.end()) {
      change(thread_number(), -static_cast<int64_t>(block_bytes));
    } else {
      change(block->second.thread, -block->second.nbytes);
      blocks_.erase(block);
    }
  }

  std::mutex mutex;

 private:
  struct Block {
    int64_t nbytes;
    uint64_t thread;
  };

  void change(uint64_t thread, int64_t nbytes) {
    for (LiveBytes* counter : counters_) {
      if (!counter->counts(thread)) continue;
      counter->now_ += nbytes;
      counter->peak_ = std::max(counter->peak_, counter->now_);
    }
  }

  std::vector<LiveBytes*> counters_;
  std::unordered_map<const void*, Block> blocks_;
};

std::unique_ptr<LiveBytes> LiveBytes::start(Scope scope) {
  if (!serve_tensors()) return nullptr;
  std::unique_ptr<LiveBytes> counter(
      new LiveBytes(scope == Scope::kThread ? thread_number() : uint64_t{0}));
  LiveBlocks::instance().add(counter.get());
  return counter;
}

LiveBytes::~LiveBytes() { LiveBlocks::instance().remove(this); }

int64_t LiveBytes::now() const {
  std::lock_guard lock(LiveBlocks::instance().mutex);
  return now_;
}

int64_t LiveBytes::take_peak() {
  std::lock_guard lock(LiveBlocks::instance().mutex);
  return std::exchange(peak_, now_);
}

void note_taken(const void* data, size_t nbytes) { LiveBlocks::instance().taken(data, nbytes); }

void note_freed(const void* data, size_t block_bytes) {
  LiveBlocks::instance().freed(data, block_bytes);
}

}  // namespace tessera
