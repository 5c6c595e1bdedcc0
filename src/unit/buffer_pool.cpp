#include "unit/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace tessera {

struct BufferPool::Blocks {
  struct Block {
    void* data;
    size_t capacity;
  };
  std::mutex mutex;
  std::vector<Block> free;
  size_t idle = 0;     // bytes in `free`
  size_t largest = 0;  // block so far

  ~Blocks() { release(); }

  void release() {
    for (const Block& block : free) c10::free_cpu(block.data);
    free.clear();
    idle = 0;
  }

  // The smallest free block that fits and is not wastefully large.
  Block take(size_t nbytes) {
    {
      std::lock_guard lock(mutex);
      auto best = free.end();
      for (auto it = free.begin(); it != free.end(); ++it) {
        const bool fits = it->capacity >= nbytes && it->capacity <= nbytes + nbytes / 2;
        if (fits && (best == free.end() || it->capacity < best->capacity)) best = it;
      }
      if (best != free.end()) {
        const Block block = *best;
        free.erase(best);
        idle -= block.capacity;
        return block;
      }
    }
    return {c10::alloc_cpu(nbytes), nbytes};
  }

  // The oldest blocks go first when too much lies idle: units are freed just before others are
  // gathered, so one block of the largest kind is enough.
  void put(Block block) {
    std::lock_guard lock(mutex);
    largest = std::max(largest, block.capacity);
    free.push_back(block);
    idle += block.capacity;
    while (idle > largest) {
      idle -= free.front().capacity;
      c10::free_cpu(free.front().data);
      free.erase(free.begin());
    }
  }
};

BufferPool::BufferPool() : blocks_(std::make_shared<Blocks>()) {}

at::Tensor BufferPool::take(int64_t numel, at::ScalarType dtype, at::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  // CUDA's caching allocator is such a pool itself.
  if (!device.is_cpu() || numel == 0) return at::empty({numel}, options);
  const size_t nbytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  const Blocks::Block block = blocks_->take(nbytes);
  auto give_back = [blocks = blocks_, block](void*) { blocks->put(block); };
  return at::from_blob(block.data, {numel}, std::move(give_back), options);
}

void BufferPool::trim() {
  std::lock_guard lock(blocks_->mutex);
  blocks_->release();
}

}  // namespace tessera
