#include "base/memory/page_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

PageHeap::PageHeap(size_t reserved_bytes) : reserved_(reserved_bytes / kPage * kPage) {
  void* data = ::mmap(nullptr, reserved_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return;  // every allocation is then refused
  begin_ = reinterpret_cast<Address>(data);
  ask_for_huge_pages(data, reserved_);
  insert_free(begin_, reserved_);
}

PageHeap::PageHeap(std::shared_ptr<SharedMemory> memory)
    : shared_(std::move(memory)),
      reserved_(shared_->nbytes() / kPage * kPage),
      begin_(reinterpret_cast<Address>(shared_->data())) {
  insert_free(begin_, reserved_);
}

PageHeap::~PageHeap() {
  if (begin_ != 0 && !shared_) ::munmap(reinterpret_cast<void*>(begin_), reserved_);
}

void PageHeap::insert_free(Address begin, size_t length) {
  free_by_address_.emplace(begin, length);
  free_by_length_.emplace(length, begin);
}

void PageHeap::erase_free(std::map<Address, size_t>::iterator range) {
  free_by_length_.erase({range->second, range->first});
  free_by_address_.erase(range);
}

void* PageHeap::allocate(size_t nbytes) {
  const size_t length = (std::max<size_t>(nbytes, 1) + kPage - 1) / kPage * kPage;
  std::lock_guard lock(mutex_);
  if (!kept_.empty()) give_back_unseen();
  const auto best = free_by_length_.lower_bound({length, 0});
  if (best == free_by_length_.end()) return nullptr;
  const auto [available, begin] = *best;
  erase_free(free_by_address_.find(begin));
  if (available > length) insert_free(begin + length, available - length);
  used_.emplace(begin, Block{length, children_.forks()});
  used_bytes_ += length;
  extent_ = std::max(extent_, begin + length - begin_);
  return reinterpret_cast<void*>(begin);
}

bool PageHeap::free(void* data) {
  const auto address = reinterpret_cast<Address>(data);
  std::lock_guard lock(mutex_);
  const auto used = used_.find(address);
  if (used == used_.end()) return false;
  const Block block = used->second;
  used_.erase(used);
  if (shared_ && block.forks < children_.last_seeing()) {
    kept_.push_back({address, block});
  } else {
    give_back(address, block.length);
  }
  return true;
}

void PageHeap::give_back_unseen() {
  const int64_t last = children_.last_seeing();
  std::erase_if(kept_, [&](const Kept& kept) {
    if (kept.block.forks < last) return false;
    give_back(kept.begin, kept.block.length);
    return true;
  });
}

void PageHeap::give_back(Address begin, size_t length) {
  used_bytes_ -= length;
  const auto next = free_by_address_.lower_bound(begin);
  if (next != free_by_address_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      length += previous->second;
      erase_free(previous);
    }
  }
  if (next != free_by_address_.end() && next->first == begin + length) {
    length += next->second;
    erase_free(next);
  }
  insert_free(begin, length);
}

bool PageHeap::owns(const void* data) const {
  const auto address = reinterpret_cast<Address>(data);
  return begin_ != 0 && address >= begin_ && address - begin_ < reserved_;
}

size_t PageHeap::block_bytes(const void* data) const {
  std::lock_guard lock(mutex_);
  const auto used = used_.find(reinterpret_cast<Address>(data));
  return used == used_.end() ? 0 : used->second.length;
}

void PageHeap::before_fork() {
  mutex_.lock();
  if (shared_) children_.before_fork();
}

void PageHeap::after_fork_in_parent() {
  if (shared_) children_.after_fork_in_parent();
  mutex_.unlock();
}

void PageHeap::after_fork_in_child() {
  if (shared_) children_.after_fork_in_child();
  mutex_.unlock();
}

void PageHeap::trim() {
  std::lock_guard lock(mutex_);
  for (const auto& [begin, length] : free_by_address_) {
    if (begin - begin_ >= extent_) continue;
    const size_t touched = std::min(length, begin_ + extent_ - begin);
    ::madvise(reinterpret_cast<void*>(begin), touched, shared_ ? MADV_REMOVE : MADV_DONTNEED);
  }
}

size_t PageHeap::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_bytes_;
}

size_t PageHeap::extent_bytes() const {
  std::lock_guard lock(mutex_);
  return extent_;
}

}  // namespace tessera
