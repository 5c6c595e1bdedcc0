#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "comm/message/mailbox.h"

namespace tessera {

/// A pool of reusable memory blocks of `kMaxMessageBytes`, for messages in transit.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  /// Returns a block to the pool that it came from, and keeps the pool alive.
  struct Return {
    std::shared_ptr<BlockPool> pool;
    void operator()(std::byte* block) const { pool->put(block); }
  };
  using Block = std::unique_ptr<std::byte[], Return>;

  Block take() {
    Memory memory;
    {
      const std::lock_guard lock(mutex_);
      ++in_use_;
      if (!free_.empty()) {
        memory = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (!memory)
      memory.reset(static_cast<std::byte*>(::operator new[](kMaxMessageBytes, kAlignment)));
    return Block(memory.release(), Return{shared_from_this()});
  }

  /// The number of blocks taken and not yet returned.
  size_t in_use() const {
    const std::lock_guard lock(mutex_);
    return in_use_;
  }

 private:
  // Blocks start on a page, so that a short message touches as few pages as it can.
  static constexpr std::align_val_t kAlignment{4096};
  static constexpr size_t kMaxFree = 16;

  struct Delete {
    void operator()(std::byte* block) const { ::operator delete[](block, kAlignment); }
  };
  using Memory = std::unique_ptr<std::byte[], Delete>;

  void put(std::byte* block) {
    Memory memory(block);  // deleted without the lock, unless it is kept
    const std::lock_guard lock(mutex_);
    --in_use_;
    if (free_.size() < kMaxFree) free_.push_back(std::move(memory));
  }

  mutable std::mutex mutex_;
  std::vector<Memory> free_;
  size_t in_use_ = 0;
};

}  // namespace tessera
