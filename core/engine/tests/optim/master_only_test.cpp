// Units that keep no shard beside their master weights.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/model/sharded_state.h"
#include "support/sharded_job.h"

namespace tessera::testing::master_only_test {

// A model trained for some steps, with a write by an operator between them.
struct Job : ShardedJob<Mlp> {
  explicit Job(World& world, const ShardPlan& plan, at::ScalarType model_dtype = at::kFloat)
      : ShardedJob(in_dtype(run_by<Mlp, torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2)),
                            model_dtype),
                   world, plan, {}) {}
  State train_and_write() {
    train(0, 2);
    {
      torch::NoGradGuard no_grad;
      net->head->weight.mul_(1.37);
    }
    train(2, 4);
    return state();
  }
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
INSTANTIATE_TEST_SUITE_P(Over, MasterOnly, ::testing::ValuesIn(kTransports), transport_of_test);

TEST_P(MasterOnly, GivesTheSameBitsAndSavesTheShardsThatAreFreed) {
  for (const Case& c : kCases) {
    const auto compare = [&](World& world, ShardPlan plan) {
      Job with(world, plan, c.model);
      plan.precision.master_only = true;
      Job without(world, plan, c.model);
      const State expected = with.train_and_write();
      expect_same_state(without.train_and_write(), expected, 0, "master only");
      int64_t freed = 0;
      for (const auto& unit : with.sharded.state()->units()) {
        if (!unit->frees()) continue;
        freed += unit->layout().shard_numel(world.rank()) *
                 static_cast<int64_t>(c10::elementSize(unit->layout().dtype));
      }
      const bool shares = GetParam() == Transport::kArena && tests_on_host();
      const bool frees = plan.level == ShardLevel::kParameters && world.size() > 1 && !shares;
      EXPECT_EQ(freed > 0, frees);
      const auto before = with.optimizer.memory(), after = without.optimizer.memory();
      EXPECT_EQ(after.parameters, before.parameters - freed);
      EXPECT_EQ(after.parameters == 0, frees);
      EXPECT_EQ(after.master_weights, before.master_weights);
      EXPECT_EQ(after.optimizer_state, before.optimizer_state);
      EXPECT_EQ(after.gradients, before.gradients);
    };
    on_worlds({1, 2, 3}, with_each_partition({.unit_bytes = 3000, .precision = c.precision}),
              compare, GetParam());
  }
}

TEST(MasterOnly, OfSeveralHostsThatShareMemoryInsideThemSavesNothing) {
  TESSERA_ON_HOST_ONLY("parameters in shared memory");
  run_hosts(4, by_halves, [](World& world) {
    ShardPlan plan{.precision = {.param_dtype = at::kBFloat16}};
    Job with(world, plan);
    plan.precision.master_only = true;
    Job without(world, plan);
    expect_same_state(without.train_and_write(), with.train_and_write(), 0, "hosts");
    EXPECT_TRUE(without.sharded.state()->units()[0]->frees());
    EXPECT_EQ(without.optimizer.memory().parameters, with.optimizer.memory().parameters);
  });
}

TEST(MasterOnly, LeavesUnitsWithoutMastersTheirShards) {
  run_world(2, [](World& world) {
    Job job(world, {.unit_bytes = 3000, .precision = {.master_only = true}});
    Job plain(world, {.unit_bytes = 3000});
    expect_same_state(job.train_and_write(), plain.train_and_write(), 0, "float");
    EXPECT_EQ(job.optimizer.memory().master_weights, 0);
    EXPECT_EQ(job.optimizer.memory().parameters, plain.optimizer.memory().parameters);
  });
}

TEST(MasterOnly, ValuesAreLoadedIntoTheMastersAndSeen) {
  run_world(2, [](World& world) {
    Job trained(world, {.precision = {.param_dtype = at::kBFloat16}});
    const auto values = trained.train_and_write();
    Job job(world,
            {.unit_bytes = 3000, .precision = {.param_dtype = at::kBFloat16, .master_only = true}});
    job.sharded.load_full_state(values);
    expect_same_state(job.state(), values, 0, "loaded");
  });
}

}  // namespace tessera::testing::master_only_test
