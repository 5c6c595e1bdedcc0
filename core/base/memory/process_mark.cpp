#include "base/memory/process_mark.h"

#include <pthread.h>

#include <atomic>

namespace tessera {
namespace {

// Counts the forks that lead from the process that loaded the library to this one.
std::atomic<int64_t>& forks() {
  static std::atomic<int64_t> count = 0;
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { forks().fetch_add(1, std::memory_order_relaxed); });
  return count;
}

}  // namespace

ProcessMark::ProcessMark() : forks_(forks().load(std::memory_order_relaxed)) {}

bool ProcessMark::is_inherited() const { return forks().load(std::memory_order_relaxed) != forks_; }

}  // namespace tessera
