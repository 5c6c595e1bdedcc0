// Two models that share their process groups, among ranks that are not equally fast.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include <vector>

#include "support/models.h"

namespace tessera::testing::shared_replicas_test {

constexpr int64_t kWidth = 16, kRows = 8;
constexpr int kSteps = 2, kRanks = 4;

// With these delays, rank 0 finds reductions done while it launches the next ones, and rank 2, its
// partner in the other replica, finds none of them done.
std::vector<Fault> delays_of(int rank) {
  std::vector<Fault> delays;
  const auto delay = [&](int64_t nth, int ms) {
    delays.push_back({"reduce_scatter", nth, /*fail=*/false, std::chrono::milliseconds(ms)});
  };
  if (rank <= 1) {
    for (int64_t nth = 1; nth < 8; ++nth) delay(nth, 50);
  }
  if (rank == 3) delay(0, 500);
  return delays;
}

// Models, and their gradients of the rows of one rank.
struct Pair {
  std::shared_ptr<Mlp> first = seeded(3, [] { return std::make_shared<Mlp>(kWidth, 3, kWidth); });
  std::shared_ptr<Mlp> second = seeded(4, [] { return std::make_shared<Mlp>(kWidth, 3, kWidth); });

  void backward(bool in_one, int step, int rank, double scale) const {
    const Batch batch = global_batch(step, kRows, kWidth, kWidth);
    const auto x = rows_of(batch.x, rank, kRanks), y = rows_of(batch.y, rank, kRanks);
    if (in_one) return (torch::mse_loss(second->forward(first->forward(x)), y) * scale).backward();
    (torch::mse_loss(second->forward(x), y) * scale).backward();
    (torch::mse_loss(first->forward(x), y) * scale).backward();
  }
};

Pair train_pair_alone(bool in_one) {
  Pair pair;
  torch::optim::SGD first(pair.first->parameters(), 0.1), second(pair.second->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    first.zero_grad();
    second.zero_grad();
    for (int rank = 0; rank < kRanks; ++rank) pair.backward(in_one, step, rank, 1.0 / kRanks);
    first.step();
    second.step();
  }
  return pair;
}

void expect_parity_of_pair(bool in_one) {
  const Pair expected = train_pair_alone(in_one);
  run_world(kRanks, [&](World& world) {
    const auto groups = world.hybrid_process_groups(2);
    const ShardPlan plan{
        .unit_bytes = kWidth * kWidth * 4,
        .process_group = fault_process_group(groups.shard, delays_of(world.rank())),
        .replicate_group = groups.replicate};
    const Pair pair;
    torch::optim::SGD first(pair.first->parameters(), 0.1), second(pair.second->parameters(), 0.1);
    auto first_model = fully_shard(pair.first, plan);
    auto second_model = fully_shard(pair.second, plan);
    ShardedOptimizer first_step(first_model, first), second_step(second_model, second);
    for (int step = 0; step < kSteps; ++step) {
      first_step.zero_grad();
      second_step.zero_grad();
      pair.backward(in_one, step, world.rank(), 1);
      first_step.step();  // its gradients came last
      second_step.step();
    }
    expect_same_state(first_model.full_state(), plain_state(*expected.first), 2e-6, "first");
    expect_same_state(second_model.full_state(), plain_state(*expected.second), 2e-6, "second");
  });
}

TEST(SharedReplicas, OneBackwardGivesGradientsToTwoModels) { expect_parity_of_pair(true); }
TEST(SharedReplicas, TwoBackwardsComeBeforeTheSteps) { expect_parity_of_pair(false); }

}  // namespace tessera::testing::shared_replicas_test
