// Two models that one backward gives gradients to, in another order on each rank.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "support/models.h"

namespace tessera::testing::two_models_test {

constexpr int64_t kWidth = 8, kRows = 4;
constexpr int kSteps = 4;

struct Pair {
  std::shared_ptr<Mlp> first = seeded(3, [] { return std::make_shared<Mlp>(kWidth, 2, kWidth); });
  std::shared_ptr<Mlp> second = seeded(4, [] { return std::make_shared<Mlp>(kWidth, 2, kWidth); });

  torch::Tensor loss(int step, int rank, int ranks) const {
    const Batch batch = global_batch(step, kRows * ranks, kWidth, kWidth);
    const auto x = rows_of(batch.x, rank, ranks), y = rows_of(batch.y, rank, ranks);
    Mlp &one = rank % 2 ? *second : *first, &other = rank % 2 ? *first : *second;
    return torch::mse_loss(other.forward(one.forward(x)), y);
  }
};

std::shared_ptr<Pair> train_alone(int ranks) {
  const auto pair = std::make_shared<Pair>();
  torch::optim::SGD first(pair->first->parameters(), 0.1), second(pair->second->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    first.zero_grad();
    second.zero_grad();
    for (int rank = 0; rank < ranks; ++rank) pair->loss(step, rank, ranks).backward();
    first.step();
    second.step();
  }
  return pair;
}

// A rank's part of it. Each model has its own process group.
void train(World& world, ShardLevel level, const Pair& expected) {
  const Pair pair;
  torch::optim::SGD first(pair.first->parameters(), 0.1), second(pair.second->parameters(), 0.1);
  std::vector<int> ranks(world.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto plan = [&] {
    return ShardPlan{.level = level,
                     .unit_bytes = 300,
                     .average = false,
                     .process_group = world.new_process_group(ranks)};
  };
  auto first_model = fully_shard(pair.first, plan());
  auto second_model = fully_shard(pair.second, plan());
  ShardedOptimizer first_step(first_model, first), second_step(second_model, second);
  for (int step = 0; step < kSteps; ++step) {
    first_step.zero_grad();
    second_step.zero_grad();
    pair.loss(step, world.rank(), world.size()).backward();
    first_step.step();
    second_step.step();
  }
  expect_same_state(first_model.full_state(), plain_state(*expected.first), 0, "first");
  expect_same_state(second_model.full_state(), plain_state(*expected.second), 0, "second");
}

TEST(TwoModels, MayBeUsedInOppositeOrders) {
  std::vector<ShardPlan> kept = at_each_level();
  kept.pop_back();  // parameters stay whole
  for (const int ranks : {2, 3}) {
    const auto expected = train_alone(ranks);
    for (const Transport transport : kTransports) {
      on_worlds(
          {ranks}, kept,
          [&](World& world, const ShardPlan& plan) { train(world, plan.level, *expected); },
          transport);
    }
  }
}

// Each rank waits for the other's gathers.
TEST(TwoModels, WhoseParametersAreFreedMustBeUsedInOneOrder) {
  TESSERA_ON_HOST_ONLY("waits of a device's backend are not watched");
  const auto expected = train_alone(2);
  run_over(Transport::kGloo, 2, [&](World& world) {
    expect_error([&] { train(world, ShardLevel::kParameters, *expected); },
                 {"ranks wait for each other", "rank 0 waits for rank 1 in all_gather",
                  "rank 1 waits for rank 0 in all_gather"});
  });
}

}  // namespace tessera::testing::two_models_test
