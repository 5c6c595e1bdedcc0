#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace tessera {

/// A pool of reusable memory blocks of one size, for messages in transit.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  /// Returns a block to the pool that it came from, and keeps the pool alive.
  struct Return {
    std::shared_ptr<BlockPool> pool;
    void operator()(std::byte* block) const { pool->put(block); }
  };
  using Block = std::unique_ptr<std::byte[], Return>;

  /// Keeps at most `max_free` unused blocks of `block_bytes`.
  BlockPool(size_t block_bytes, size_t max_free);
  ~BlockPool();

  Block take();

  size_t block_bytes() const { return block_bytes_; }
  /// The number of blocks taken and not yet returned.
  size_t in_use() const;

 private:
  void put(std::byte* block);

  const size_t block_bytes_;
  const size_t max_free_;
  mutable std::mutex mutex_;
  std::vector<std::byte*> free_;
  size_t in_use_ = 0;
};

}  // namespace tessera
