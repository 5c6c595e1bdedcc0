// A rank that evaluates alone: where ranks share memory it waits for no other rank, but elsewhere
// it would.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "support/models.h"
#include "support/warnings.h"

namespace tessera::testing::lone_evaluation_test {

using TrainStep = std::function<void()>;

// Returns how often each of two ranks warned while `loop` ran; `step` is a training step.
std::vector<int> warnings_in(
    ShardLevel level,
    const std::function<void(World&, Sharded<Mlp>&, const TrainStep& step)>& loop) {
  std::vector<int> counts(2);
  run_arena(2, [&](World& world) {
    auto sharded = fully_shard(seeded(7, [] { return std::make_shared<Mlp>(37, 2, 5); }),
                               {.level = level, .unit_bytes = 6000});
    torch::optim::SGD sgd(sharded->parameters(), 0.1);
    ShardedOptimizer optimizer(sharded, sgd);
    const auto step = [&] {
      optimizer.zero_grad();
      sharded.forward(on_test_device(torch::ones({3, 37}))).sum().backward();
      optimizer.step();
    };
    for (const std::string& text : warnings_of([&] {
           for (int i = 0; i < 3; ++i) step();
           loop(world, sharded, step);
           for (int i = 0; i < 3; ++i) step();
         }))
      if (text.find("outside of training") != std::string::npos) ++counts[world.rank()];
  });
  return counts;
}

void evaluate(Sharded<Mlp>& sharded) {
  const torch::NoGradGuard no_grad;
  sharded.forward(on_test_device(torch::ones({3, 37})));
}

using Counts = std::vector<int>;

TEST(LoneEvaluation, IsToldOnceToTheRankThatTookNoPart) {
  TESSERA_ON_HOST_ONLY("ranks that share no memory wait for one another in a gather");
  EXPECT_EQ(warnings_in(ShardLevel::kParameters,
                        [](World& world, Sharded<Mlp>& sharded, const TrainStep& step) {
                          for (int i = 0; i < 3; ++i) {
                            if (world.rank() == 0) evaluate(sharded);
                            step();
                          }
                        }),
            (Counts{0, 1}));
}

TEST(LoneEvaluation, OfAllRanksIsNone) {
  EXPECT_EQ(warnings_in(ShardLevel::kParameters,
                        [](World&, Sharded<Mlp>& sharded, const TrainStep& step) {
                          for (int i = 0; i < 3; ++i) {
                            evaluate(sharded);
                            step();
                          }
                        }),
            (Counts{0, 0}));
}

TEST(LoneEvaluation, GoesWellAnywhereWhereParametersStay) {
  const auto alone = [](World& world, Sharded<Mlp>& sharded, const TrainStep& step) {
    if (world.rank() == 0) evaluate(sharded);
    step();
  };
  EXPECT_EQ(warnings_in(ShardLevel::kGradients, alone), (Counts{0, 0}));
  EXPECT_EQ(warnings_in(ShardLevel::kParameters,
                        [&](World& world, Sharded<Mlp>& sharded, const TrainStep& step) {
                          {
                            const auto guard = sharded.keep_unsharded();
                            if (world.rank() == 0) evaluate(sharded);
                          }
                          step();
                        }),
            (Counts{0, 0}));
}

}  // namespace tessera::testing::lone_evaluation_test
