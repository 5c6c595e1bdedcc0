#include "message/block_pool.h"

#include <new>

namespace tessera {
namespace {

// Blocks start on a page, so that a short message touches as few pages as it can.
constexpr std::align_val_t kAlignment{4096};

}  // namespace

BlockPool::BlockPool(size_t block_bytes, size_t max_free)
    : block_bytes_(block_bytes), max_free_(max_free) {
  free_.reserve(max_free);
}

BlockPool::~BlockPool() {
  for (std::byte* block : free_) {
    ::operator delete[](block, kAlignment);
  }
}

BlockPool::Block BlockPool::take() {
  std::byte* block = nullptr;
  {
    std::lock_guard lock(mutex_);
    ++in_use_;
    if (!free_.empty()) {
      block = free_.back();
      free_.pop_back();
    }
  }
  if (block == nullptr) {
    block = static_cast<std::byte*>(::operator new[](block_bytes_, kAlignment));
  }
  return Block(block, Return{shared_from_this()});
}

size_t BlockPool::in_use() const {
  std::lock_guard lock(mutex_);
  return in_use_;
}

void BlockPool::put(std::byte* block) {
  {
    std::lock_guard lock(mutex_);
    --in_use_;
    if (free_.size() < max_free_) {
      free_.push_back(block);
      return;
    }
  }
  ::operator delete[](block, kAlignment);
}

}  // namespace tessera
