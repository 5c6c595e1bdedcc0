#include "comm/arena/ledger.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace tessera {

static_assert(std::atomic<uint32_t>::is_always_lock_free, "ranks share atomics between processes");

// The futex calls have no FUTEX_PRIVATE_FLAG: the word is in the memory of several processes.
void Bell::ring() {
  // Either the sleeper sees the new count, or this rank sees the sleeper.
  rings.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0)
    ::syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep(uint32_t seen, std::chrono::milliseconds longest) {
  timespec time{.tv_sec = longest.count() / 1000, .tv_nsec = longest.count() % 1000 * 1'000'000};
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &time, nullptr, 0);
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Ledger::ring_others(int rank) const {
  for (int other = 0; other < size_; ++other) {
    if (other != rank) bell(other).ring();
  }
}

}  // namespace tessera
