#include "memory/page_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "memory/huge_pages.h"

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
  const auto best = free_by_length_.lower_bound({length, 0});
  if (best == free_by_length_.end()) return nullptr;
  const auto [available, begin] = *best;
  erase_free(free_by_address_.find(begin));
  if (available > length) insert_free(begin + length, available - length);
  used_.emplace(begin, length);
  used_bytes_ += length;
  extent_ = std::max(extent_, begin + length - begin_);
  return reinterpret_cast<void*>(begin);
}

bool PageHeap::free(void* data) {
  const auto address = reinterpret_cast<Address>(data);
  std::lock_guard lock(mutex_);
  const auto used = used_.find(address);
  if (used == used_.end()) return false;
  Address begin = address;
  size_t length = used->second;
  used_bytes_ -= length;
  used_.erase(used);
  const auto next = free_by_address_.lower_bound(begin);
  if (next != free_by_address_.end() && next->first == begin + length) {
    length += next->second;
    erase_free(next);
  }
  const auto after = free_by_address_.lower_bound(begin);
  if (after != free_by_address_.begin()) {
    const auto previous = std::prev(after);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      length += previous->second;
      erase_free(previous);
    }
  }
  insert_free(begin, length);
  return true;
}

bool PageHeap::owns(const void* data) const {
  const auto address = reinterpret_cast<Address>(data);
  return begin_ != 0 && address >= begin_ && address - begin_ < reserved_;
}

size_t PageHeap::block_bytes(const void* data) const {
  std::lock_guard lock(mutex_);
  const auto used = used_.find(reinterpret_cast<Address>(data));
  return used == used_.end() ? 0 : used->second;
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
