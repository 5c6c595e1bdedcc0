#include "arena/ledger.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <new>
#include <utility>

namespace tessera {
namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free, "ranks share atomics between processes");

// Not FUTEX_PRIVATE_FLAG: the word is in the memory of several processes.
void wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

Ledger::Ledger(std::shared_ptr<SharedMemory> memory, int size)
    : memory_(std::move(memory)),
      size_(size),
      boards_(reinterpret_cast<RankBoard*>(memory_->data())) {}

std::shared_ptr<Ledger> Ledger::create(int size) {
  // All members start at zero, as fresh pages do; no other rank can see them before this returns.
  std::shared_ptr<Ledger> ledger(
      new Ledger(SharedMemory::create("tessera ledger", nbytes(size)), size));
  for (int rank = 0; rank < size; ++rank) new (&ledger->boards_[rank]) RankBoard();
  return ledger;
}

std::shared_ptr<Ledger> Ledger::open(const SharedMemoryHandle& handle, int size) {
  return std::shared_ptr<Ledger>(
      new Ledger(SharedMemory::open(handle, SharedMemory::Access::kWrite), size));
}

PostSlot& Ledger::slot(int rank, int channel, int64_t sequence) const {
  return boards_[rank].slots[channel][sequence % kSlots];
}

Bell& Ledger::bell(int rank) const { return boards_[rank].bell; }

void Ledger::ring(int rank) const {
  Bell& bell = boards_[rank].bell;
  // Either the sleeper sees the new count, or this rank sees the sleeper.
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) > 0) wake_all(bell.rings);
}

void Ledger::ring_others(int rank) const {
  for (int other = 0; other < size_; ++other) {
    if (other != rank) ring(other);
  }
}

void sleep_on(Bell& bell, uint32_t seen, std::chrono::milliseconds longest) {
  timespec time{.tv_sec = longest.count() / 1000, .tv_nsec = longest.count() % 1000 * 1'000'000};
  ::syscall(SYS_futex, &bell.rings, FUTEX_WAIT, seen, &time, nullptr, 0);
}

}  // namespace tessera
