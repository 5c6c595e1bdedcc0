// Ranks that use different parts of a model from step to step.
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "model/sharded_state.h"
#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace uneven_use_test {

using namespace testing;

// A layer that is used by one rank in one step and by another in the next. The layer that is
// registered second is used first, so the order of use is not that of registration.
struct Alternating : Net {
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::gelu(second(torch::gelu(first(x))));
    if (rank == step % 2) x = x + sometimes(x);
    return last(x);
  }
  torch::nn::Linear second = register_module("second", torch::nn::Linear(37, 37));
  torch::nn::Linear first = register_module("first", torch::nn::Linear(37, 37));
  torch::nn::Linear sometimes = register_module("sometimes", torch::nn::Linear(37, 37));
  torch::nn::Linear unused = register_module("unused", torch::nn::Linear(37, 37));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(37, 5));
};

TEST(UnevenUse, ALayerMayBeUsedByAnotherRankInEachStep) {
  for (const int ranks : {2, 3}) {
    for (const int64_t unit_bytes : {int64_t{0}, int64_t{6000}}) {
      for (const int prefetch : {0, 1, 2}) {
        expect_parity(sgd_run<Alternating>(), ranks,
                      {.unit_bytes = unit_bytes, .prefetch = prefetch}, "alternating");
      }
    }
  }
}

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

// Appends the loss of each of four steps to `losses`. Between backward and step comes a forward
// that throws, if `throws`.
void train(World& world, bool throws, bool by_handle, std::vector<float>& losses) {
  const auto net = seeded(7, [] { return std::make_shared<Interrupted>(); });
  net->rank = world.rank();
  torch::optim::SGD sgd(net->parameters(), 0.5);
  auto sharded = fully_shard(net, {.unit_bytes = 0});
  ShardedOptimizer optimizer(sharded, sgd);
  for (int step = 0; step < 4; ++step) {
    const Batch batch = global_batch(step, 6, 37, 5);
    const auto forward = [&] {
      return by_handle ? sharded.forward(batch.x) : net->forward(batch.x);
    };
    const torch::Tensor loss = torch::mse_loss(forward(), batch.y);
    losses.push_back(loss.item<float>());
    loss.backward();
    if (throws) {
      net->throws = true;
      try {
        forward();
      } catch (const std::runtime_error&) {
      }
      net->throws = false;
    }
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(UnevenUse, AForwardMayThrowBeforeARankHasUsedALayer) {
  for (const int ranks : {2, 3}) {
    run_world(ranks, [](World& world) {
      std::vector<float> expected, losses;
      train(world, false, true, expected);
      train(world, true, true, losses);
      EXPECT_EQ(losses, expected);
    });
  }
}

// Without the handle, a rank that has used nothing does not know that a pass began on others.
TEST(UnevenUse, GathersFromBeforeAStepAreNotTakenForLaterOnes) {
  TESSERA_ON_HOST_ONLY("collectives of devices are compared at the end of the backward");
  std::vector<std::vector<float>> expected(2), losses(2);
  run_world(2, [&](World& world) { train(world, false, false, expected[world.rank()]); });
  EXPECT_THROW(run_world(
                   2, [&](World& world) { train(world, true, false, losses[world.rank()]); },
                   std::chrono::seconds(3)),
               c10::DistBackendError);
  for (int rank = 0; rank < 2; ++rank) {
    for (size_t step = 0; step < losses[rank].size(); ++step)
      EXPECT_EQ(losses[rank][step], expected[rank][step]) << "rank " << rank << ", step " << step;
  }
}

}  // namespace uneven_use_test
}  // namespace tessera
