#pragma once

#include <memory>
#include <string>

#include "memory/page_heap.h"

namespace tessera {

/// Another rank of this host, in another process or in another thread of this one. Gives access to
/// its memory and reports whether it is alive.
class Neighbour {
 public:
  /// `heap`: handle of the rank's shared heap; `base`: the heap's address in that rank.
  /// Throws as `SharedMemory::open` does, and `std::system_error` if the system refuses a pidfd.
  Neighbour(const SharedMemoryHandle& heap, uint64_t base);
  ~Neighbour();
  Neighbour(const Neighbour&) = delete;
  Neighbour& operator=(const Neighbour&) = delete;

  /// Returns true if the rank is a thread of this process, with the same addresses.
  bool is_thread_here() const { return heap_ == nullptr; }
  int64_t pid() const { return pid_; }
  /// Returns the address in this process of the rank's memory at `address`, which must be in its
  /// shared heap unless it is a thread of this process. Write to it only where that rank asks for
  /// it.
  void* seen_from_here(uint64_t address) const;
  /// Returns true once its process has ended. Makes a system call.
  bool has_died() const;

 private:
  int64_t pid_;
  uint64_t base_;
  std::shared_ptr<SharedMemory> heap_;  // null: a thread of this process
  int pidfd_ = -1;
};

}  // namespace tessera
