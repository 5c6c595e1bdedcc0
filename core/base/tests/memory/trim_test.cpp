#include <gtest/gtest.h>

#include <cstdlib>
#include <latch>
#include <thread>
#include <vector>

#include "base/memory/tensor_allocator.h"

namespace tessera::trim_test {
namespace {

// As ranks that are threads do when they shard a model. The sanitizers' malloc stands in for
// glibc's, whose heap the first call initializes: hence each time in a process that has not called
// it.
void trim_at_once() {
  constexpr int kThreads = 8;
  std::latch all_are_there(kThreads);
  std::vector<std::jthread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      all_are_there.arrive_and_wait();
      trim_heaps();
    });
  }
}

TEST(TrimHeaps, MayBeCalledByThreadsAtOnce) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer ends a forked child that starts threads";
#endif
  for (int i = 0; i < 50; ++i) {
    EXPECT_EXIT((trim_at_once(), std::_Exit(0)), testing::ExitedWithCode(0), "");
  }
}

}  // namespace
}  // namespace tessera::trim_test
