// Units that keep no shard beside their master weights.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/model/sharded_state.h"
#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera {
namespace master_only_test {

using namespace testing;

constexpr int64_t kWidth = 37, kRows = 12, kOut = 5;

// A model trained for some steps, with a write by an operator between them.
struct Job {
  Job(const ShardPlan& plan, at::ScalarType model_dtype = at::kFloat) {
    net = seeded(7, [] { return std::make_shared<Mlp>(kWidth, 3, kOut); });
    net->to(model_dtype);
    inner =
        std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(1e-2));
    sharded = std::make_unique<Sharded<Mlp>>(fully_shard(net, plan));
    optimizer = std::make_unique<ShardedOptimizer>(*sharded, *inner);
  }
  void step(World& world, int i) {
    const Batch batch = global_batch(i, kRows, kWidth, kOut);
    const auto x = rows_of(batch.x, world.rank(), world.size());
    optimizer->zero_grad();
    const auto out = net->forward(x.to(net->head->weight.dtype()));
    torch::mse_loss(out.to(torch::kFloat), rows_of(batch.y, world.rank(), world.size())).backward();
    optimizer->step();
  }
  std::vector<NamedTensor> train(World& world) {
    for (int i = 0; i < 2; ++i) step(world, i);
    {
      torch::NoGradGuard no_grad;
      net->head->weight.mul_(1.37);
    }
    for (int i = 2; i < 4; ++i) step(world, i);
    return sharded->full_state();
  }
  std::shared_ptr<Mlp> net;
  std::unique_ptr<torch::optim::AdamW> inner;
  std::unique_ptr<Sharded<Mlp>> sharded;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

struct Case {
  at::ScalarType model;
  Precision precision;
};
const std::vector<Case> kCases = {
    {at::kFloat, {.param_dtype = at::kBFloat16}},
    {at::kFloat, {.param_dtype = at::kHalf, .reduce_dtype = at::kFloat}},
    {at::kBFloat16, {.master_dtype = at::kFloat}},
    {at::kFloat, {.gather_dtype = at::kBFloat16}},
};

class MasterOnly : public ::testing::TestWithParam<Transport> {};
INSTANTIATE_TEST_SUITE_P(Over, MasterOnly, ::testing::Values(Transport::kGloo, Transport::kArena),
                         [](const auto& info) {
                           return info.param == Transport::kArena ? "Arena" : "Gloo";
                         });

TEST_P(MasterOnly, GivesTheSameBitsAndSavesTheShardsThatAreFreed) {
  for (const Case& c : kCases) {
    for (const int ranks : {1, 2, 3}) {
      const auto run = [&](World& world) {
        for (const ShardLevel level : kAllLevels) {
          for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
            ShardPlan plan{.level = level,
                           .partition = partition,
                           .unit_bytes = 3000,
                           .precision = c.precision};
            Job with(plan, c.model);
            plan.precision.master_only = true;
            Job without(plan, c.model);
            const auto expected = with.train(world);
            expect_same_state(
                without.train(world), expected, 0,
                fmt::format("{} ranks, level {}, partition {}", ranks, int(level), int(partition)));
            int64_t freed = 0;
            for (const auto& unit : with.sharded->state()->units()) {
              if (!unit->frees()) continue;
              freed += unit->layout().shard_numel(world.rank()) *
                       static_cast<int64_t>(c10::elementSize(unit->layout().dtype));
            }
            const bool shares = GetParam() == Transport::kArena && tests_on_host();
            const bool frees = level == ShardLevel::kParameters && ranks > 1 && !shares;
            EXPECT_EQ(freed > 0, frees);
            const auto before = with.optimizer->memory(), after = without.optimizer->memory();
            EXPECT_EQ(after.parameters, before.parameters - freed);
            EXPECT_EQ(after.parameters == 0, frees);
            EXPECT_EQ(after.master_weights, before.master_weights);
            EXPECT_EQ(after.optimizer_state, before.optimizer_state);
            EXPECT_EQ(after.gradients, before.gradients);
          }
        }
      };
      run_world(ranks, run, std::chrono::seconds(30), GetParam());
    }
  }
}

TEST(MasterOnly, OfSeveralHostsThatShareMemoryInsideThemSavesNothing) {
  TESSERA_ON_HOST_ONLY("parameters in shared memory");
  run_hosts(4, by_halves, [](World& world) {
    ShardPlan plan{.precision = {.param_dtype = at::kBFloat16}};
    Job with(plan);
    plan.precision.master_only = true;
    Job without(plan);
    expect_same_state(without.train(world), with.train(world), 0, "hosts");
    EXPECT_TRUE(without.sharded->state()->units()[0]->frees());
    EXPECT_EQ(without.optimizer->memory().parameters, with.optimizer->memory().parameters);
  });
}

TEST(MasterOnly, LeavesUnitsWithoutMastersTheirShards) {
  run_world(2, [](World& world) {
    Job job({.unit_bytes = 3000, .precision = {.master_only = true}});
    Job plain({.unit_bytes = 3000});
    expect_same_state(job.train(world), plain.train(world), 0, "float");
    EXPECT_EQ(job.optimizer->memory().master_weights, 0);
    EXPECT_EQ(job.optimizer->memory().parameters, plain.optimizer->memory().parameters);
  });
}

TEST(MasterOnly, ValuesAreLoadedIntoTheMastersAndSeen) {
  run_world(2, [](World& world) {
    Job trained({.precision = {.param_dtype = at::kBFloat16}});
    const auto values = trained.train(world);
    Job job({.unit_bytes = 3000, .precision = {.param_dtype = at::kBFloat16, .master_only = true}});
    job.sharded->load_full_state(values);
    expect_same_state(job.sharded->full_state(), values, 0, "loaded");
  });
}

}  // namespace master_only_test
}  // namespace tessera
