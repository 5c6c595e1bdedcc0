// Paddle's own tests of `group_sharded_parallel` with a `dp_group`, with smaller models: 4 ranks
// shard, or 2 shard and 2 replicate. (Those of dygraph_group_sharded_stage3_dp.py drop the results
// of their comparisons; here they count.)
#include <gtest/gtest.h>

#include "dialects/paddle/tests/scenario.h"

namespace tessera::testing::group_sharded_scenario_hybrid_test {

constexpr int kRanks = 4;
constexpr double kTolerance = 1e-5;  // of losses
double tolerance_of_half() { return rounds_sums() ? kRoundedLoss : kTolerance; }

Scenario hybrid(Scenario scenario, int shard_size = 2) {
  scenario.place = [shard_size](World& world, paddle::GroupShardedOptions& options) {
    const auto process_groups = world.hybrid_process_groups(shard_size);
    options.group = process_groups.shard;
    options.dp_group = process_groups.replicate;
  };
  return scenario;
}

class GroupShardedHybrid : public ::testing::TestWithParam<std::string> {
 protected:
  Trained run(const Scenario& scenario) const { return train(kRanks, GetParam(), scenario); }
};

TEST_P(GroupShardedHybrid, Fp32GivesTheLossesOfShardingOverAllRanks) {
  const Trained sharded = run({}), replicated = run(hybrid({})), alone = train_alone(kRanks, {});
  expect_close_losses(replicated, sharded, 1e-6, GetParam());
  expect_close_losses(replicated, alone, 1e-6, GetParam());
  expect_close(replicated.state, sharded.state, 1e-6, 1e-6, GetParam());
}

TEST_P(GroupShardedHybrid, SeveralBackwardsPerStepGiveTheLossesOfShardingOverAllRanks) {
  const Scenario parts{.parts = 5};
  const Trained sharded = run(parts), replicated = run(hybrid(parts));
  expect_close_losses(replicated, sharded, 1e-6, GetParam());
  expect_close(replicated.state, sharded.state, 1e-6, 1e-6, GetParam());
}

// Adds up two ranks, then two such sums: bit-identical in float, as masters and sums are float.
TEST_P(GroupShardedHybrid, HalfPrecisionGivesTheLossesOfShardingOverAllRanks) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    Scenario scenario{.o2 = dtype, .init_scale = dtype == at::kHalf ? 32768.0 : 0};
    const Trained sharded = run(scenario), replicated = run(hybrid(scenario));
    expect_close_losses(replicated, sharded, tolerance_of_half(), c10::toString(dtype));
    expect_close(replicated.state, sharded.state, 1e-4, rounds_sums() ? kRoundedState : 1e-3,
                 c10::toString(dtype));
  }
}

TEST_P(GroupShardedHybrid, AutocastGivesTheLossesOfShardingOverAllRanks) {
  const Scenario scenario{.o1 = at::kBFloat16};
  expect_close_losses(run(hybrid(scenario)), run(scenario), kTolerance, GetParam());
}

TEST_P(GroupShardedHybrid, ReplicasOfOneRankOrOfAllAreTheSameAgain) {
  const Trained sharded = run({});
  for (const int shard_size : {1, kRanks}) {
    const Trained other = run(hybrid({}, shard_size));
    expect_close_losses(other, sharded, 1e-6, GetParam());
    expect_close(other.state, sharded.state, 1e-6, 1e-6, GetParam());
  }
}

TEST_P(GroupShardedHybrid, WhatWasSavedGoesOnOverAllRanksAndBack) {
  const ScratchDirectory directory;
  const Scenario scenario{.o2 = at::kHalf, .init_scale = 1024}, replicated = hybrid(scenario);
  for (const bool replicated_first : {true, false}) {
    run_world(kRanks, [&](World& world) {
      ScenarioJob job(world, GetParam(), replicated_first ? replicated : scenario);
      ScenarioJob next(world, GetParam(), replicated_first ? scenario : replicated);
      job.train(0, 3);
      paddle::save_group_sharded_model(job.sharded.model, directory.path(), &job.sharded.optimizer);
      paddle::load_group_sharded_model(next.sharded.model, directory.path(),
                                       &next.sharded.optimizer);
      expect_same_state(next.sharded.model.full_state(), job.sharded.model.full_state(), 0,
                        "loaded");
      job.train(3, 6);
      next.train(3, 6);
      for (size_t i = 0; i < next.losses.size(); ++i)
        EXPECT_NEAR(next.losses[i], job.losses[i + 3], tolerance_of_half());
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, GroupShardedHybrid, ::testing::Values("os", "os_g", "p_g_os"));

}  // namespace tessera::testing::group_sharded_scenario_hybrid_test
