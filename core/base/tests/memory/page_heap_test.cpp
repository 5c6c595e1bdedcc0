// The heap of pages that large CPU tensors come from.

#include "base/memory/page_heap.h"

#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <tessera/base/page_heap.h>
#include <torch/torch.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "support/forked.h"

namespace tessera::page_heap_test {

constexpr size_t kPage = 4096;

std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

TEST(PageHeap, CutsFromTheShortestFreeRangeThatIsLongEnough) {
  PageHeap heap(100 * kPage);
  auto* a = bytes(heap.allocate(10 * kPage));
  void* b = heap.allocate(1);
  auto* c = bytes(heap.allocate(4 * kPage));
  void* d = heap.allocate(kPage);
  EXPECT_EQ(b, a + 10 * kPage);
  EXPECT_EQ(d, c + 4 * kPage);
  EXPECT_TRUE(heap.free(a));
  EXPECT_TRUE(heap.free(c));
  EXPECT_EQ(heap.allocate(3 * kPage), c);
  EXPECT_EQ(heap.allocate(5 * kPage), a);
  EXPECT_EQ(heap.extent_bytes(), 16 * kPage);
}

TEST(PageHeap, WhatIsFreedJoinsItsNeighbours) {
  PageHeap heap(64 * kPage);
  std::vector<void*> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(heap.allocate(kPage));
  EXPECT_EQ(heap.allocate(1), nullptr);
  for (int i = 0; i < 64; i += 2) heap.free(blocks[i]);
  EXPECT_EQ(heap.allocate(2 * kPage), nullptr);
  for (int i = 1; i < 64; i += 2) heap.free(blocks[i]);
  EXPECT_EQ(heap.used_bytes(), 0u);
  EXPECT_EQ(heap.allocate(64 * kPage), blocks[0]);
}

TEST(PageHeap, RefusesWhatIsNotItsOwn) {
  PageHeap heap(8 * kPage);
  auto* block = bytes(heap.allocate(2 * kPage));
  int other = 0;
  EXPECT_FALSE(heap.free(&other));
  EXPECT_FALSE(heap.free(block + kPage));
  EXPECT_TRUE(heap.owns(block + kPage));
  EXPECT_FALSE(heap.owns(&other));
  EXPECT_TRUE(heap.free(block));
  EXPECT_FALSE(heap.free(block));
}

TEST(PageHeap, RefusesEverythingIfThereAreNoAddresses) {
  PageHeap heap(size_t{1} << 60);
  EXPECT_EQ(heap.allocate(1), nullptr);
  EXPECT_FALSE(heap.owns(nullptr));
}

TEST(PageHeap, TrimKeepsBlocksAndClearsTheRest) {
  PageHeap heap(8 * kPage);
  auto* kept = bytes(heap.allocate(kPage));
  auto* freed = bytes(heap.allocate(kPage));
  *kept = *freed = std::byte{7};
  heap.free(freed);
  heap.trim();
  EXPECT_EQ(*kept, std::byte{7});
  EXPECT_EQ(heap.allocate(kPage), freed);
  EXPECT_EQ(*freed, std::byte{0});
}

// Forks as the allocator does.
std::unique_ptr<Forked> fork_with(PageHeap& heap, const std::function<void()>& fn) {
  heap.before_fork();
  auto child = std::make_unique<Forked>([&] {
    heap.after_fork_in_child();
    fn();
  });
  heap.after_fork_in_parent();
  return child;
}

TEST(PageHeap, KeepsSharedBlocksThatAChildSees) {
  PageHeap heap(SharedMemory::create("test", 64 * kPage));
  auto* const seen = bytes(heap.allocate(8 * kPage));
  auto child = fork_with(heap, [] { ::pause(); });
  auto* const unseen = bytes(heap.allocate(8 * kPage));
  EXPECT_TRUE(heap.free(seen));
  EXPECT_FALSE(heap.free(seen));
  EXPECT_TRUE(heap.free(unseen));
  EXPECT_EQ(heap.allocate(8 * kPage), unseen);
  EXPECT_EQ(heap.used_bytes(), 16 * kPage);
  child.reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(heap.allocate(8 * kPage), seen);
}

TEST(PageHeap, UsesPrivateBlocksAgainThatAChildHasACopyOf) {
  PageHeap heap(64 * kPage);
  void* const block = heap.allocate(8 * kPage);
  const auto child = fork_with(heap, [] { ::pause(); });
  heap.free(block);
  EXPECT_EQ(heap.allocate(8 * kPage), block);
}

TEST(PageHeap, BlocksOfManyThreadsDoNotOverlap) {
  PageHeap heap(4096 * kPage);
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::pair<std::byte*, size_t>> blocks;
    const auto mark = static_cast<std::byte>(seed);
    for (int i = 0; i < 2000; ++i) {
      if (blocks.size() < 20 && random() % 2 == 0) {
        const size_t nbytes = 1 + random() % (16 * kPage);
        auto* block = bytes(heap.allocate(nbytes));
        ASSERT_NE(block, nullptr);
        std::memset(block, static_cast<int>(seed), nbytes);
        blocks.emplace_back(block, nbytes);
      } else if (!blocks.empty()) {
        std::swap(blocks[random() % blocks.size()], blocks.back());
        const auto [block, nbytes] = blocks.back();
        ASSERT_EQ(block[0], mark);
        ASSERT_EQ(block[nbytes - 1], mark);
        ASSERT_TRUE(heap.free(block));
        blocks.pop_back();
      }
    }
    for (const auto& [block, nbytes] : blocks) heap.free(block);
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) threads.emplace_back(work, seed);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(heap.used_bytes(), 0u);
}

bool is_page_aligned(const torch::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kPage == 0;
}

TEST(UsePageHeap, ServesLargeTensorsAndLeavesSmallOnes) {
  const auto before = torch::ones({1'000'000});
  if (!use_page_heap()) GTEST_SKIP() << "not under the address sanitizer";
  void* first = nullptr;
  {
    const auto large = torch::ones({1'000'000});
    first = large.data_ptr();
    EXPECT_TRUE(is_page_aligned(large));
    EXPECT_EQ(large.sum().item<float>(), 1e6f);
  }
  EXPECT_EQ(torch::empty({1'000'000}).data_ptr(), first);
  EXPECT_EQ(torch::ones({100}).sum().item<float>(), 100);
  EXPECT_EQ(before.sum().item<float>(), 1e6f);
}

TEST(UsePageHeap, TensorsMayBeFreedByAnotherThread) {
  if (!use_page_heap()) GTEST_SKIP() << "not under the address sanitizer";
  auto tensor = torch::ones({1'000'000});
  void* const data = tensor.data_ptr();
  std::thread([moved = std::move(tensor)]() mutable { moved.reset(); }).join();
  EXPECT_EQ(torch::empty({1'000'000}).data_ptr(), data);
}

TEST(UsePageHeap, ItsBlocksCanBeTakenAndGivenBackRaw) {
  if (!use_page_heap()) GTEST_SKIP() << "not under the address sanitizer";
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  for (const size_t nbytes : {size_t{100}, size_t{1} << 20}) {
    void* const data = allocator->raw_allocate(nbytes);
    std::memset(data, 1, nbytes);
    allocator->raw_deallocate(data);
  }
}

TEST(UsePageHeap, IsRefusedByTheEnvironment) {
  ::setenv("TESSERA_PAGE_HEAP", "0", 1);
  c10::Allocator* const previous = c10::GetCPUAllocator();
  EXPECT_FALSE(use_page_heap());
  EXPECT_EQ(c10::GetCPUAllocator(), previous);
  ::unsetenv("TESSERA_PAGE_HEAP");
}

TEST(UsePageHeap, LeavesAnAllocatorOfTheUserAlone) {
  class OwnAllocator final : public c10::Allocator {
   public:
    c10::DataPtr allocate(size_t n) override { return c10::GetDefaultCPUAllocator()->allocate(n); }
    void copy_data(void* to, const void* from, size_t n) const override {
      default_copy_data(to, from, n);
    }
  } own;
  c10::Allocator* const previous = c10::GetCPUAllocator();
  c10::SetAllocator(c10::DeviceType::CPU, &own);
  EXPECT_FALSE(use_page_heap());
  EXPECT_EQ(c10::GetCPUAllocator(), &own);
  c10::SetAllocator(c10::DeviceType::CPU, previous);
}

}  // namespace tessera::page_heap_test
