#include "engine/model/memory_count.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace memory_count_test {

using namespace testing;

// Each host has the parameters in memory that its ranks share, and gathers those of the other host.
TEST(MemoryCounts, MemoryThatRanksShareIsTheModelsAndNotTheAllocators) {
  TESSERA_ON_HOST_ONLY("parameters in shared memory");
  run_hosts(4, by_halves, [](World&) {
    const auto net = seeded(7, [] { return std::make_shared<Mlp>(37, 3, 5); });
    const auto sharded = fully_shard(net, {.unit_bytes = 6000, .resident_bytes = -1});
    MemoryCount count(*sharded.state());
    {
      const torch::NoGradGuard no_grad;
      net->forward(global_batch(0, 12, 37, 5).x);
    }
    // Messages to slow peers may be in this rank's memory for a moment.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    MemoryBytes bytes = count.take().bytes;
    while (bytes.other != 0 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      bytes = count.take().bytes;
    }
    EXPECT_GT(bytes.gathered, 0);
    EXPECT_EQ(bytes.other, 0);
  });
}

}  // namespace memory_count_test
}  // namespace tessera
