#include "base/memory/tensor_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <pthread.h>
#include <tessera/base/page_heap.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "base/memory/live_bytes.h"

namespace tessera {

// [Note: Heaps after a fork]
//
// Tensors lie on a heap of private pages, of which a child has a copy, as of malloc's; and, where
// ranks share memory, on a heap that all of them have mapped. There the child sees its parent's
// blocks: the parent reuses none of them before the child has ended or started another program
// (`PageHeap`), and the child's writes go into copies of the pages (`SharedMemory`). The child may
// see in-place changes of the parent, though. The child allocates its own tensors on the heap of
// private pages, and a block that it frees on its parent's heap is not reused: the bookkeeping
// there is the parent's. If the child joins a world, it makes a shared heap of its own.
namespace {

// From this size on, glibc's malloc by default maps a block, and unmaps it when it is freed.
constexpr size_t kMinBytes = size_t{128} << 10;

// A process has addresses for 128 TiB; the heaps of all ranks of the host may take a quarter of
// them.
constexpr size_t kMostAddresses = size_t{32} << 40;

// Addresses cost nothing; memory is allocated when it is first touched.
size_t addresses_to_reserve() {
  return 4 * static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Made once, never destroyed: tensors in static variables may be destroyed last.
std::atomic<PageHeap*> shared_pages = nullptr;

// In a child, the shared heaps of its ancestors.
std::vector<PageHeap*>& inherited_pages() {
  static auto* const heaps = new std::vector<PageHeap*>();
  return *heaps;
}
std::atomic<bool> has_inherited_pages = false;

bool is_allowed() {
#if defined(__SANITIZE_ADDRESS__)
  return false;
#else
  const char* const choice = std::getenv("TESSERA_PAGE_HEAP");
  return choice == nullptr || std::string_view(choice) != "0";
#endif
}

class TensorAllocator final : public c10::Allocator {
 public:
  // Never destroyed: tensors in static variables may be destroyed last.
  static TensorAllocator& instance() {
    static auto* const allocator = new TensorAllocator();
    return *allocator;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes >= kMinBytes ? take_pages(nbytes) : nullptr;
    if (data) {
      c10::profiledCPUMemoryReporter().New(data, nbytes);
    } else {
      data = malloc_->allocate(nbytes).release_context();
    }
    if (counting_live_bytes && data) note_taken(data, nbytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  // Both kinds have a context equal to their pointer, as this function requires.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

  PageHeap& pages() { return pages_; }

 private:
  void* take_pages(size_t nbytes) {
    if (!has_pages_) return nullptr;
    PageHeap* const shared = shared_pages;
    void* const data = shared ? shared->allocate(nbytes) : nullptr;
    return data ? data : pages_.allocate(nbytes);
  }

  TensorAllocator()
      : has_pages_(is_allowed()),
        pages_(has_pages_ ? addresses_to_reserve() : 0),
        malloc_(c10::GetDefaultCPUAllocator()) {}

  // Returns the heap that contains `data`; null: malloc's.
  PageHeap* heap_of(const void* data) {
    PageHeap* const shared = shared_pages;
    if (shared && shared->owns(data)) return shared;
    if (pages_.owns(data)) return &pages_;
    if (!has_inherited_pages) return nullptr;
    const auto heap = std::ranges::find_if(
        inherited_pages(), [&](const PageHeap* inherited) { return inherited->owns(data); });
    return heap != inherited_pages().end() ? *heap : nullptr;
  }

  static void release(void* data) {
    TensorAllocator& self = instance();
    PageHeap* const pages = self.heap_of(data);
    if (counting_live_bytes && data)
      note_freed(data, pages ? pages->block_bytes(data) : ::malloc_usable_size(data));
    if (!pages) return self.malloc_->raw_deleter()(data);
    c10::profiledCPUMemoryReporter().Delete(data);
    pages->free(data);
  }

  const bool has_pages_;
  PageHeap pages_;
  c10::Allocator* const malloc_;
};

// The allocator if it was ever installed: making it reserves addresses.
std::atomic<TensorAllocator*> installed = nullptr;

// The heaps that this thread has locked while it forks.
struct HeldHeaps {
  std::mutex mutex;
  std::vector<PageHeap*> heaps;
};
HeldHeaps& held_heaps() {
  static auto* const held = new HeldHeaps();
  return *held;
}

void before_fork() {
  HeldHeaps& held = held_heaps();
  held.mutex.lock();
  held.heaps = inherited_pages();
  if (TensorAllocator* const allocator = installed) held.heaps.push_back(&allocator->pages());
  if (PageHeap* const shared = shared_pages) held.heaps.push_back(shared);
  for (PageHeap* const heap : held.heaps) heap->before_fork();
}

void after_fork_in_parent() {
  HeldHeaps& held = held_heaps();
  for (PageHeap* const heap : held.heaps) heap->after_fork_in_parent();
  held.mutex.unlock();
}

void after_fork_in_child() {
  HeldHeaps& held = held_heaps();
  for (PageHeap* const heap : held.heaps) heap->after_fork_in_child();
  if (PageHeap* const shared = shared_pages.exchange(nullptr)) {
    inherited_pages().push_back(shared);
    has_inherited_pages = true;
  }
  held.mutex.unlock();
}

void survive_forks() {
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

}  // namespace

bool serve_tensors() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) {
    survive_forks();
    installed = &TensorAllocator::instance();
    c10::SetAllocator(c10::DeviceType::CPU, installed);
  }
  return installed != nullptr && c10::GetCPUAllocator() == installed;
}

bool use_page_heap() { return is_allowed() && serve_tensors(); }

PageHeap& shared_heap(int ranks) {
  survive_forks();
  if (!shared_pages) {
    const size_t nbytes = std::min(addresses_to_reserve(), kMostAddresses / ranks);
    auto made = std::make_unique<PageHeap>(SharedMemory::create("tessera heap", nbytes));
    // Ranks that are threads call this at the same time.
    PageHeap* none = nullptr;
    if (shared_pages.compare_exchange_strong(none, made.get())) made.release();
  }
  return *shared_pages;
}

void trim_heaps() {
  if (PageHeap* const shared = shared_pages) shared->trim();
  if (TensorAllocator* const allocator = installed) allocator->pages().trim();
  // If another malloc replaces glibc's, this call is the first to initialize glibc's heap, and two
  // at once would see it half made.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  malloc_trim(0);
}

}  // namespace tessera
