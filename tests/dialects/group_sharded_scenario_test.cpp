// Paddle's own tests of `group_sharded_parallel` in fp32, with smaller models: AdamW, clipping,
// several backwards a step, fused and single buffers.
#include <gtest/gtest.h>

#include "dialects/training.h"

namespace tessera {
namespace {

using namespace testing;

// Adam divides by the root of what may be tiny: rounding errors grow.
constexpr double kTolerance = 1e-5;

Training adamw_with_clipping() {
  return {.optimizer = make_adamw, .options = {.segment_size = 100}, .steps = 8, .clip = 1.0};
}

TEST(GroupShardedScenario, EveryLevelGivesTheResultOfOneProcess) {
  expect_parity(adamw_with_clipping(), kTolerance);
}

TEST(GroupShardedScenario, LevelsAgree) {
  for (const int ranks : {2, 3}) {
    const auto os_g = train_sharded(ranks, "os_g", adamw_with_clipping());
    expect_same_state(train_sharded(ranks, "os", adamw_with_clipping()), os_g, 0, "os");
    expect_same_state(train_sharded(ranks, "p_g_os", adamw_with_clipping()), os_g, 1e-6, "p_g_os");
  }
}

TEST(GroupShardedScenario, OneBackwardOrSeveralOfItsPartsAreTheSame) {
  Training parts = adamw_with_clipping();
  parts.backwards = 3;
  for (const std::string level : {"os_g", "p_g_os"}) {
    expect_same_state(train_sharded(2, level, parts),
                      train_sharded(2, level, adamw_with_clipping()), kTolerance, level);
  }
}

TEST(GroupShardedScenario, OneParamGroupIsTheSameAsAList) {
  Training group = adamw_with_clipping();
  group.optimizer = [](Net& net) {
    const auto options = torch::optim::AdamWOptions(1e-3).weight_decay(1e-5);
    std::vector<torch::optim::OptimizerParamGroup> groups = {
        {net.parameters(), std::make_unique<torch::optim::AdamWOptions>(options)}};
    return std::make_unique<torch::optim::AdamW>(std::move(groups), options);
  };
  for (const std::string level : {"os_g", "p_g_os"}) {
    expect_same_state(train_sharded(2, level, group),
                      train_sharded(2, level, adamw_with_clipping()), 0, level);
  }
}

TEST(GroupShardedScenario, SingleBuffersGiveTheBitsOfFusedOnes) {
  for (const int ranks : {2, 3}) {
    Training single = adamw_with_clipping(), fused = adamw_with_clipping();
    single.clip = fused.clip = 0;  // the norm is a sum over buffers
    single.options.buffer_max_size = 0;
    expect_same_state(train_sharded(ranks, "os_g", single), train_sharded(ranks, "os_g", fused), 0,
                      "os_g");
  }
}

TEST(GroupShardedScenario, SynchronousGathersGiveTheBitsOfPrefetchedOnes) {
  for (const int64_t buffer_max_size : {0, 1000, 1 << 23}) {
    Training synchronous = adamw_with_clipping(), prefetched = adamw_with_clipping();
    synchronous.options.buffer_max_size = prefetched.options.buffer_max_size = buffer_max_size;
    synchronous.options.sync_comm = true;
    expect_same_state(train_sharded(2, "p_g_os", synchronous),
                      train_sharded(2, "p_g_os", prefetched), 0,
                      "units of " + std::to_string(buffer_max_size));
  }
}

}  // namespace
}  // namespace tessera
