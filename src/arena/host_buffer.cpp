#include "arena/host_buffer.h"

#include <utility>

namespace tessera {
namespace {

static_assert(std::atomic<int64_t>::is_always_lock_free, "ranks share atomics between processes");

// The counters have pages of their own, which are never returned to the system.
constexpr int64_t kPage = 4096;

int64_t counters_begin(int64_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

}  // namespace

// The counters start at zero, as fresh pages do.
int64_t HostBuffer::nbytes_with_counters(int64_t nbytes, int ranks) {
  return counters_begin(nbytes) + (1 + ranks) * static_cast<int64_t>(sizeof(Counter));
}

HostBuffer::HostBuffer(std::shared_ptr<SharedMemory> memory, int64_t nbytes, int index, int ranks)
    : memory_(std::move(memory)), nbytes_(nbytes), index_(index), ranks_(ranks) {}

HostBuffer::Counter* HostBuffer::counters() const {
  return reinterpret_cast<Counter*>(memory_->data() + counters_begin(nbytes_));
}

size_t HostBuffer::offset_of(const at::Tensor& flat) const {
  return static_cast<const std::byte*>(flat.const_data_ptr()) - memory_->data();
}

void HostBuffer::begin_gather(std::vector<ByteRange> foreign) {
  const std::lock_guard lock(mutex_);
  released(index_).store(gathers_, std::memory_order_seq_cst);
  ++gathers_;
  foreign_ = std::move(foreign);
}

void HostBuffer::release() {
  const std::lock_guard lock(mutex_);
  if (released(index_).load(std::memory_order_relaxed) == gathers_) return;
  released(index_).store(gathers_, std::memory_order_seq_cst);
  for (int index = 0; index < ranks_; ++index) {
    if (released(index).load(std::memory_order_seq_cst) < gathers_) return;
  }
  // Two ranks may both find that they are the last.
  int64_t last = emptied().load(std::memory_order_seq_cst);
  if (last >= gathers_ || !emptied().compare_exchange_strong(last, gathers_)) return;
  for (const ByteRange& range : foreign_) memory_->give_back(range.begin, range.end);
}

}  // namespace tessera
