// KeepUnsharded: effects of the end of its scope.
#include <gtest/gtest.h>

#include "support/models.h"

namespace tessera::testing::keep_unsharded_test {

void train(World& world, const std::function<void(int step)>& before_step) {
  const auto net = on_test_device(std::make_shared<Mlp>(37, 3, 5));
  torch::optim::SGD inner(net->parameters(), 0.1);
  auto sharded = fully_shard(net, {.unit_bytes = 6000});
  ShardedOptimizer optimizer(sharded, inner);
  const auto whole = sharded.keep_unsharded();
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    rank_loss(*net, global_batch(step, 12, 37, 5), world.rank(), world.size(), step).backward();
    before_step(step);
    optimizer.step();  // gathers all units again
  }
}

// The exception ends the guard while a gather is under way that the peer never joins.
TEST(KeepUnsharded, EndsWhileAnExceptionUnwindsAfterAPeerFailed) {
  EXPECT_THROW(run_world(
                   2,
                   [](World& world) {
                     train(world, [&](int step) {
                       if (world.rank() == 1 && step == 2)
                         throw std::runtime_error("rank 1 gives up");
                     });
                   },
                   std::chrono::seconds(5)),
               std::exception);
}

TEST(KeepUnsharded, ItsEndFreesTheUnitsAndTheNextUseGathersThem) {
  run_world(2, [](World&) {
    const auto net = on_test_device(std::make_shared<Mlp>(37, 3, 5));
    auto sharded = fully_shard(net, {.unit_bytes = 6000});
    {
      const auto whole = sharded.keep_unsharded();
      EXPECT_NO_THROW(net->head->weight.data_ptr<float>());
    }
    EXPECT_ANY_THROW(net->head->weight.data_ptr<float>());
    torch::NoGradGuard no_grad;
    const auto x = on_test_device(torch::ones({2, 37}));
    EXPECT_TRUE(net->forward(x).isfinite().all().item<bool>());
  });
}

}  // namespace tessera::testing::keep_unsharded_test
