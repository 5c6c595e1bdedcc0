#include "base/memory/live_bytes.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/memory/tensor_allocator.h"

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
struct LiveBlocks {
  struct Block {
    int64_t nbytes;
    uint64_t thread;
  };

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

  void change(const Block& block, int64_t sign) {
    for (LiveBytes* const counter : counters) {
      if (counter->thread_ != 0 && counter->thread_ != block.thread) continue;
      counter->now_ += sign * block.nbytes;
      counter->peak_ = std::max(counter->peak_, counter->now_);
    }
  }

  std::mutex mutex;
  std::vector<LiveBytes*> counters;
  std::unordered_map<const void*, Block> blocks;
};

std::unique_ptr<LiveBytes> LiveBytes::start(Scope scope) {
  if (!serve_tensors()) return nullptr;
  std::unique_ptr<LiveBytes> counter(
      new LiveBytes(scope == Scope::kThread ? thread_number() : uint64_t{0}));
  LiveBlocks& live = LiveBlocks::instance();
  const std::lock_guard lock(live.mutex);
  live.counters.push_back(counter.get());
  counting_live_bytes = true;
  return counter;
}

LiveBytes::~LiveBytes() {
  LiveBlocks& live = LiveBlocks::instance();
  const std::lock_guard lock(live.mutex);
  std::erase(live.counters, this);
  if (!live.counters.empty()) return;
  counting_live_bytes = false;
  live.blocks.clear();
}

int64_t LiveBytes::now() const {
  const std::lock_guard lock(LiveBlocks::instance().mutex);
  return now_;
}

int64_t LiveBytes::take_peak() {
  const std::lock_guard lock(LiveBlocks::instance().mutex);
  return std::exchange(peak_, now_);
}

void note_taken(const void* data, size_t nbytes) {
  LiveBlocks& live = LiveBlocks::instance();
  const std::lock_guard lock(live.mutex);
  if (live.counters.empty()) return;
  const LiveBlocks::Block block{static_cast<int64_t>(nbytes), thread_number()};
  live.blocks.insert_or_assign(data, block);
  live.change(block, 1);
}

void note_freed(const void* data, size_t block_bytes) {
  LiveBlocks& live = LiveBlocks::instance();
  const std::lock_guard lock(live.mutex);
  const auto known = live.blocks.extract(data);
  live.change(known ? known.mapped()
                    : LiveBlocks::Block{static_cast<int64_t>(block_bytes), thread_number()},
              -1);
}

}  // namespace tessera
