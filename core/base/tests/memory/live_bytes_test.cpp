#include "base/memory/live_bytes.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <tessera/base/page_heap.h>
#include <tessera/base/process_memory.h>
#include <torch/torch.h>

#include <cstdlib>
#include <cstring>
#include <thread>

namespace tessera::live_bytes_test {

using Scope = LiveBytes::Scope;

torch::Tensor bytes(int64_t count) { return torch::empty({count}, torch::kByte); }

TEST(LiveBytes, CountsTensorsOfAllSizesToTheByte) {
  const auto counter = LiveBytes::start(Scope::kProcess);
  ASSERT_TRUE(counter);
  int64_t expected = 0;
  std::vector<torch::Tensor> kept;
  for (const int64_t count : {1, 100, 4096, 131071, 131072, 1000001}) {
    kept.push_back(bytes(count));
    expected += count;
    EXPECT_EQ(counter->now(), expected);
  }
  for (const torch::Tensor& tensor : kept) expected -= tensor.numel();
  kept.clear();
  EXPECT_EQ(expected, 0);
  EXPECT_EQ(counter->now(), 0);
}

TEST(LiveBytes, KnowsTheMostSinceItWasAskedLast) {
  const auto counter = LiveBytes::start(Scope::kProcess);
  const auto kept = bytes(1000);
  bytes(200000);
  EXPECT_EQ(counter->take_peak(), 201000);
  EXPECT_EQ(counter->take_peak(), 1000);
  bytes(5);
  EXPECT_EQ(counter->take_peak(), 1005);
}

TEST(LiveBytes, OlderTensorsThatAreFreedCountByTheirBlocks) {
  ASSERT_TRUE(LiveBytes::start(Scope::kProcess));  // the allocator is in place from here on
  auto small = bytes(1000), large = bytes(200000);
  const auto counter = LiveBytes::start(Scope::kProcess);
  small.reset();
  EXPECT_LE(counter->now(), -1000);
  EXPECT_GE(counter->now(), -1200);
  large.reset();
  EXPECT_LE(counter->now(), -201000);
  EXPECT_GE(counter->now(), -201000 - 4096 - 200);
}

TEST(LiveBytes, TensorsCountForTheThreadThatMadeThemWhoeverFreesThem) {
  const auto all = LiveBytes::start(Scope::kProcess);
  const auto mine = LiveBytes::start(Scope::kThread);
  auto made_here = bytes(300000);
  torch::Tensor made_there;
  std::thread([&] {
    made_there = bytes(7000);
    made_here.reset();
  }).join();
  EXPECT_EQ(mine->now(), 0);
  EXPECT_EQ(all->now(), 7000);
  made_there.reset();
  EXPECT_EQ(mine->now(), 0);
  EXPECT_EQ(all->now(), 0);
}

TEST(LiveBytes, NothingIsRememberedWhenNobodyCounts) {
  torch::Tensor tensor;
  {
    const auto counter = LiveBytes::start(Scope::kProcess);
    EXPECT_TRUE(counting_live_bytes);
    tensor = bytes(50);
  }
  EXPECT_FALSE(counting_live_bytes);
  const auto counter = LiveBytes::start(Scope::kProcess);
  tensor.reset();
  EXPECT_LE(counter->now(), -50);
}

// A page that several processes map counts partly for each: a process that loads LibTorch beside
// this test lowers this process's share, and restores it as it ends. Hence the many attempts.
TEST(ProcessMemory, PssGrowsWithTouchedPages) {
  constexpr int64_t nbytes = 64 << 20, tolerance = 1 << 20;
  int64_t untouched = 0, touched = 0;
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int64_t before = pss_bytes();
    void* pages = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(pages, MAP_FAILED);
    untouched = pss_bytes() - before;
    std::memset(pages, 1, nbytes);
    touched = pss_bytes() - before;
    munmap(pages, nbytes);
    if (std::abs(untouched) < tolerance && std::abs(touched - nbytes) < tolerance) return;
  }
  FAIL() << "with " << nbytes << " bytes PSS grew by " << untouched << ", and by " << touched
         << " when they were written";
}

}  // namespace tessera::live_bytes_test
