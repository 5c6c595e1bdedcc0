#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/forked_children.h"
#include "memory/shared_memory.h"

namespace tessera {

/// Blocks of whole pages out of one range of addresses. What is freed joins its free neighbours and
/// keeps its pages; a block is cut from the shortest free range that is long enough. Thread-safe.
///
/// A forked child has a copy of private pages. Shared ones it sees as they are: a block that was
/// there at the fork is not used again before the child has gone. See [Note: Heaps after a fork] in
/// tensor_allocator.cpp.
class PageHeap {
 public:
  /// Reserves addresses, not memory.
  explicit PageHeap(size_t reserved_bytes);
  /// Out of pages that other processes may have mapped.
  explicit PageHeap(std::shared_ptr<SharedMemory> memory);
  ~PageHeap();
  PageHeap(const PageHeap&) = delete;
  PageHeap& operator=(const PageHeap&) = delete;

  /// Null if the range is used up.
  void* allocate(size_t nbytes);
  /// False if `data` is not a block of this heap.
  bool free(void* data);
  bool owns(const void* data) const;
  /// Bytes of the block `data`; 0 if it is none of this heap.
  size_t block_bytes(const void* data) const;

  /// Gives the pages of all free ranges back to the system.
  void trim();

  /// Null for private pages.
  const std::shared_ptr<SharedMemory>& shared() const { return shared_; }

  /// To be called around fork(): the first in the parent, then each of the others on its side. No
  /// thread is in the heap meanwhile.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

  /// Bytes in blocks, among them those kept for a child, and in the part of the range that was ever
  /// used.
  size_t used_bytes() const;
  size_t extent_bytes() const;

 private:
  using Address = uintptr_t;

  struct Block {
    size_t length;
    int64_t forks;  // before it was taken
  };
  struct Kept {
    Address begin;
    Block block;
  };

  void give_back(Address begin, size_t length);
  void give_back_unseen();
  void insert_free(Address begin, size_t length);
  void erase_free(std::map<Address, size_t>::iterator range);

  const std::shared_ptr<SharedMemory> shared_;  // null: private pages
  const size_t reserved_;
  Address begin_ = 0;
  mutable std::mutex mutex_;
  std::map<Address, size_t> free_by_address_;
  std::set<std::pair<size_t, Address>> free_by_length_;
  std::unordered_map<Address, Block> used_;
  ForkedChildren children_;
  std::vector<Kept> kept_;  // freed, but a child may be reading it
  size_t used_bytes_ = 0;
  size_t extent_ = 0;
};

}  // namespace tessera
