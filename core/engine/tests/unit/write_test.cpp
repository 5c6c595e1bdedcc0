// Writes of operators while messages with the old values are under way.
#include <gtest/gtest.h>

#include "support/models.h"
#include "support/run_world.h"
#include "support/test_device.h"
#include "support/unchanged_inputs.h"

namespace tessera::testing {
namespace {

// At levels at which parameters stay, messages are sent from their own memory.
TEST(Writes, WaitUntilPeersHaveTheOldValues) {
  run_world(
      3,
      [](World& world) {
        for (const ShardLevel level : kAllLevels) {
          SCOPED_TRACE(static_cast<int>(level));
          const auto model = seeded(3, [] { return std::make_shared<Mlp>(5, 2, 3); });
          torch::optim::SGD inner(model->parameters(), 0.5);
          auto sharded = fully_shard(
              model,
              {.level = level, .process_group = with_unchanged_inputs(world.process_group())});
          ShardedOptimizer optimizer(sharded, inner);
          for (int step = 0; step < 3; ++step) {
            model->forward(torch::ones({2, 5}, test_device())).sum().backward();
            optimizer.step();
            optimizer.zero_grad();
            torch::NoGradGuard no_grad;
            for (torch::Tensor parameter : model->parameters()) parameter.mul_(0.5);
          }
          sharded.full_state();
        }
      },
      std::chrono::seconds(60), Transport::kGloo);
}

}  // namespace
}  // namespace tessera::testing
