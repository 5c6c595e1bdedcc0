// Ranks that use different parts of a model from step to step.
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "engine/model/sharded_state.h"
#include "support/models.h"

namespace tessera::testing::uneven_use_test {

// Rank 0 throws behind its first layer, the others before theirs.
struct Interrupted : Net {
  torch::Tensor forward(torch::Tensor x) override {
    if (throws && rank > 0) throw std::runtime_error("no batch");
    x = torch::gelu(first(x));
    if (throws) throw std::runtime_error("no batch");
    return last(torch::gelu(second(x)));
  }
  bool throws = false;
  torch::nn::Linear first = register_module("first", torch::nn::Linear(37, 37));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(37, 37));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(37, 5));
};

// Returns the losses of four steps. Between backward and step comes a forward that throws, if
// `throws`.
std::vector<float> losses_of(World& world, bool throws) {
  const auto net = seeded(7, [] { return std::make_shared<Interrupted>(); });
  net->rank = world.rank();
  torch::optim::SGD sgd(net->parameters(), 0.5);
  auto sharded = fully_shard(net, {.unit_bytes = 0});
  ShardedOptimizer optimizer(sharded, sgd);
  std::vector<float> losses;
  for (int step = 0; step < 4; ++step) {
    const Batch batch = global_batch(step, 6, 37, 5);
    const torch::Tensor loss = torch::mse_loss(sharded.forward(batch.x), batch.y);
    losses.push_back(loss.item<float>());
    loss.backward();
    if (throws) {
      net->throws = true;
      EXPECT_THROW(sharded.forward(batch.x), std::runtime_error);
      net->throws = false;
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return losses;
}

TEST(UnevenUse, AForwardMayThrowBeforeARankHasUsedALayer) {
  for (const int ranks : {2, 3}) {
    run_world(ranks,
              [](World& world) { EXPECT_EQ(losses_of(world, true), losses_of(world, false)); });
  }
}

}  // namespace tessera::testing::uneven_use_test
