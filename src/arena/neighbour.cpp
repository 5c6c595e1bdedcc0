#include "arena/neighbour.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace tessera {

Neighbour::Neighbour(const SharedMemoryHandle& heap, uint64_t base) : pid_(heap.pid), base_(base) {
  auto memory = SharedMemory::open(heap, SharedMemory::Access::kWrite);
  if (reinterpret_cast<uint64_t>(memory->data()) == base && pid_ == ::getpid()) return;
  heap_ = std::move(memory);
  heap_->close_descriptor();
  // A pidfd always refers to the same process, while a pid may be reused. The id of its memory was
  // checked just now, so this is the right process.
  pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  if (pidfd_ < 0) throw std::system_error(errno, std::generic_category(), "pidfd_open");
}

Neighbour::~Neighbour() {
  if (pidfd_ >= 0) ::close(pidfd_);
}

void* Neighbour::seen_from_here(uint64_t address) const {
  if (is_thread_here()) return reinterpret_cast<void*>(address);
  return heap_->data() + (address - base_);
}

bool Neighbour::has_died() const {
  if (pidfd_ < 0) return false;
  pollfd entry{.fd = pidfd_, .events = POLLIN, .revents = 0};
  return ::poll(&entry, 1, 0) > 0;
}

}  // namespace tessera
