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

#include "base/memory/forked_children.h"
#include "base/memory/shared_memory.h"

namespace tessera {

/// Allocates blocks of whole pages from one range of addresses. A freed block joins its free
/// neighbours and keeps its pages; a block is cut from the shortest free range that is long enough.
/// Thread-safe.
///
/// A forked child has a copy of private pages. It sees shared pages as they are, so a block that
/// existed at the fork is not reused before the child ends. See [Note: Heaps after a fork] in
/// tensor_allocator.cpp.
class PageHeap {
 public:
  /// Reserves addresses, not memory.
  explicit PageHeap(size_t reserved_bytes);
  /// Uses pages that other processes may have mapped.
  explicit PageHeap(std::shared_ptr<SharedMemory> memory);
  ~PageHeap();
  PageHeap(const PageHeap&) = delete;
  PageHeap& operator=(const PageHeap&) = delete;

  /// Returns null if no free range is long enough.
  void* allocate(size_t nbytes);
  /// Returns false if `data` is not a block of this heap.
  bool free(void* data);
  bool owns(const void* data) const;
  /// Returns the bytes of the block `data`; 0 if it is not a block of this heap.
  size_t block_bytes(const void* data) const;

  /// Returns the pages of all free ranges to the system.
  void trim();

  /// Null for private pages.
  const std::shared_ptr<SharedMemory>& shared() const { return shared_; }

  /// Must be called around fork(): the first in the parent, then each of the others on its side. No
  /// other thread uses the heap in between.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

  /// Return the bytes in blocks, including those kept for a child, and in the part of the range
  /// that was ever used.
  size_t used_bytes() const;
  size_t extent_bytes() const;

 private:
  using Address = uintptr_t;

  struct Block {
    size_t length;
    int64_t forks;  // before it was allocated
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
