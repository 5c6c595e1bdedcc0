#pragma once

#include <memory>
#include <string>

#include "memory/page_heap.h"

namespace tessera {

/// Another rank of this host, in another process or another thread of this one: its memory and
/// whether it lives.
class Neighbour {
 public:
  /// `heap`: of its shared heap; `base`: where it has that heap itself.
  /// Throws as `SharedMemory::open` does.
  Neighbour(const SharedMemoryHandle& heap, uint64_t base);
  ~Neighbour();
  Neighbour(const Neighbour&) = delete;
  Neighbour& operator=(const Neighbour&) = delete;

  /// True if its addresses are this process' own.
  bool is_thread_here() const { return heap_ == nullptr; }
  int64_t pid() const { return pid_; }
  /// What it has at `address`, which must be in its shared heap unless it is a thread here. To be
  /// written only where it asks for that.
  void* seen_from_here(uint64_t address) const;
  /// True once its process has ended. A system call.
  bool has_died() const;

 private:
  int64_t pid_;
  uint64_t base_;
  std::shared_ptr<SharedMemory> heap_;  // null: a thread of this process
  int pidfd_ = -1;
};

}  // namespace tessera
