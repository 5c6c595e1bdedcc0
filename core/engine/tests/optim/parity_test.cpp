// Sharded training against one process that sees the whole batch: the main test of the library.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace parity_test {

using namespace testing;

constexpr int64_t kRows = 12, kWidth = 37, kOut = 5;
constexpr int kSteps = 3;  // the order of units is learned, used, and used after an update by it

struct Case {
  Transport transport;
  int ranks;
  ShardLevel level;
  Partition partition;
  int64_t unit_bytes;
};

std::string describe(const Case& c) {
  return fmt::format("{} ranks over {}, level {}, partition {}, units of {} bytes", c.ranks,
                     c.transport == Transport::kArena ? "arena" : "gloo", static_cast<int>(c.level),
                     static_cast<int>(c.partition), c.unit_bytes);
}

std::shared_ptr<Mlp> make_model() {
  return seeded(7, [] { return std::make_shared<Mlp>(kWidth, 3, kOut); });
}

std::vector<NamedTensor> train_alone() {
  auto model = make_model();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = global_batch(step, kRows, kWidth, kOut);
    optimizer.zero_grad();
    torch::mse_loss(model->forward(batch.x), batch.y).backward();
    optimizer.step();
  }
  return plain_state(*model);
}

std::vector<NamedTensor> train_sharded(World& world, const Case& c) {
  auto model = make_model();
  torch::optim::SGD inner(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto sharded =
      fully_shard(model, {.level = c.level, .partition = c.partition, .unit_bytes = c.unit_bytes});
  ShardedOptimizer optimizer(sharded, inner, {.fused = false});
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = global_batch(step, kRows, kWidth, kOut);
    optimizer.zero_grad();
    const auto out = sharded.forward(rows_of(batch.x, world.rank(), world.size()));
    torch::mse_loss(out, rows_of(batch.y, world.rank(), world.size())).backward();
    optimizer.step();
  }
  return sharded.full_state();
}

class Parity : public ::testing::TestWithParam<Transport> {};

TEST_P(Parity, EveryLevelPartitionAndUnitSizeGivesTheResultOfOneProcess) {
  const auto expected = train_alone();
  for (const int ranks : {1, 2, 3, 4}) {
    std::vector<Case> cases;
    for (const auto level : kAllLevels) {
      for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
        for (const int64_t unit_bytes : {0, 6000, 1 << 24}) {
          cases.push_back({GetParam(), ranks, level, partition, unit_bytes});
        }
      }
    }
    // By case and rank.
    std::vector<std::vector<std::vector<NamedTensor>>> states(
        cases.size(), std::vector<std::vector<NamedTensor>>(ranks));
    const auto train_each = [&](World& world) {
      for (size_t i = 0; i < cases.size(); ++i)
        states[i][world.rank()] = train_sharded(world, cases[i]);
    };
    run_world(ranks, train_each, std::chrono::seconds(30), GetParam());
    for (size_t i = 0; i < cases.size(); ++i) {
      const std::string what = describe(cases[i]);
      expect_same_state(states[i][0], expected, ranks == 1 ? 0 : 2e-6, what);
      for (const auto& state : states[i])
        expect_same_state(state, states[i][0], 0, what + ", replicas");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Over, Parity, ::testing::Values(Transport::kGloo, Transport::kArena),
                         [](const auto& info) {
                           return info.param == Transport::kArena ? "Arena" : "Gloo";
                         });

}  // namespace parity_test
}  // namespace tessera
