#include "memory/tensor_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <tessera/page_heap.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "memory/live_bytes.h"
#include "memory/page_heap.h"
#include "memory/shared_heap.h"
#include "memory/trim.h"

namespace tessera {
namespace {

// What glibc's malloc, by default, maps from the system and gives back when it is freed.
constexpr size_t kMinBytes = size_t{128} << 10;

// A process has addresses for 128 TiB; those for the heaps of all ranks of the host take a quarter
// at most.
constexpr size_t kMostAddresses = size_t{32} << 40;

// Addresses are free; memory is not there before it is touched.
size_t addresses_to_reserve() {
  return 4 * static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Made once, never destroyed: tensors in static variables may be the last to go.
std::atomic<PageHeap*> shared_pages = nullptr;

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
  // Never destroyed: tensors in static variables may be the last to go.
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

  // Both kinds have a context equal to their pointer, as this asks for.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

  void trim() { pages_.trim(); }

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

  static void release(void* data) {
    TensorAllocator& self = instance();
    PageHeap* const shared = shared_pages;
    PageHeap* const pages = shared && shared->owns(data) ? shared : &self.pages_;
    const bool is_page = pages->owns(data);
    if (counting_live_bytes && data)
      note_freed(data, is_page ? pages->block_bytes(data) : ::malloc_usable_size(data));
    if (!is_page) return self.malloc_->raw_deleter()(data);
    c10::profiledCPUMemoryReporter().Delete(data);
    pages->free(data);
  }

  const bool has_pages_;
  PageHeap pages_;
  c10::Allocator* const malloc_;
};

// The allocator if it was ever taken: making it reserves addresses.
std::atomic<TensorAllocator*> installed = nullptr;

}  // namespace

bool serve_tensors() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator()) {
    installed = &TensorAllocator::instance();
    c10::SetAllocator(c10::DeviceType::CPU, installed);
  }
  return installed != nullptr && c10::GetCPUAllocator() == installed;
}

bool use_page_heap() { return is_allowed() && serve_tensors(); }

PageHeap& shared_heap(int ranks) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!shared_pages) {
    const size_t nbytes = std::min(addresses_to_reserve(), kMostAddresses / ranks);
    shared_pages = new PageHeap(SharedMemory::create("tessera heap", nbytes));
  }
  return *shared_pages;
}

void trim_heaps() {
  if (PageHeap* const shared = shared_pages) shared->trim();
  if (TensorAllocator* const allocator = installed) allocator->trim();
  malloc_trim(0);
}

}  // namespace tessera
