// Paddle's own tests of `group_sharded_parallel` at level p_g_os, and of offload, with smaller
// models.
#include <gtest/gtest.h>

#include "dialects/paddle/tests/scenario.h"

namespace tessera::testing::group_sharded_scenario_stage3_test {

// dygraph_group_sharded_stage3.py

TEST(GroupShardedStage3, Fp32GivesWhatStage2Gives) {
  for (const int ranks : {2, 3, 4}) {
    const Trained stage3 = train(ranks, "p_g_os", {});
    expect_close(stage3.state, train(ranks, "os_g", {}).state, 1e-6, 1e-6, on(ranks));
    expect_close(stage3.state, train_alone(ranks, {}).state, 1e-6, 1e-6, on(ranks));
  }
}

TEST(GroupShardedStage3, OneBatchOrItsPartsAreTheSame) {
  for (const int ranks : {2, 4}) {
    const Trained once = train(ranks, "p_g_os", {}), parts = train(ranks, "p_g_os", {.parts = 5});
    expect_close(parts.state, once.state, 1e-6, 1e-4, on(ranks));
    expect_close(parts.state, train(ranks, "os_g", {.parts = 5}).state, 1e-6, 1e-6, on(ranks));
  }
}

TEST(GroupShardedStage3, HalfPrecisionGivesWhatStage2Gives) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    for (const int ranks : {2, 4}) {
      const Scenario scenario{.o2 = dtype, .init_scale = dtype == at::kHalf ? 32768.0 : 0};
      const auto what = c10::toString(dtype) + on(ranks);
      const Trained expected = train_alone(ranks, scenario);
      EXPECT_GT(expected.largest_norm, 1) << "clipped at least once";
      const Trained os_g = train(ranks, "os_g", scenario),
                    p_g_os = train(ranks, "p_g_os", scenario);
      expect_close(p_g_os.state, os_g.state, 1e-4, 1e-3, what);
      expect_close(os_g.state, expected.state, 1e-4, 1e-3, what);
      expect_close_losses(p_g_os, os_g, 1e-3, what);
    }
  }
}

TEST(GroupShardedStage3, SynchronousGathersGiveTheSameBits) {
  for (const int ranks : {2, 4}) {
    for (const auto dtype : {std::optional(at::kHalf), std::optional<at::ScalarType>()}) {
      Scenario prefetched{.o2 = dtype, .init_scale = 32768}, synchronous = prefetched;
      prefetched.options.buffer_max_size = synchronous.options.buffer_max_size = 1000;
      synchronous.options.sync_comm = true;
      expect_equal(train(ranks, "p_g_os", synchronous), train(ranks, "p_g_os", prefetched),
                   on(ranks));
    }
  }
}

Scenario special_scenario() {
  return {.net = [] { return with_values(std::make_shared<SpecialModel>()); }};
}

TEST(GroupShardedStage3, SpecialModelWithAnExcludedTypeGivesWhatStage2GivesInFp16) {
  Scenario scenario = special_scenario();
  scenario.o2 = at::kHalf;
  scenario.init_scale = 32768;
  scenario.options.exclude_layer = {"GroupNorm"};
  for (const int ranks : {2, 4}) {
    const Trained os_g = train(ranks, "os_g", scenario);
    expect_close(train(ranks, "p_g_os", scenario).state, os_g.state, 1e-4, 1e-3, on(ranks));
    expect_close(os_g.state, train_alone(ranks, scenario).state, 1e-4, 1e-3, on(ranks));
  }
}

TEST(GroupShardedStage3, SpecialModelWithAnExcludedAddressGivesWhatStage2GivesInFp32) {
  for (const int ranks : {2, 4}) {
    const Scenario plain = special_scenario();
    const Trained os_g = train(ranks, "os_g", plain);
    expect_close(os_g.state, train_alone(ranks, plain).state, 1e-6, 1e-6, on(ranks));
    std::vector<Trained> all(ranks);
    run_world(ranks, [&](World& world) {
      Scenario scenario = plain;
      const auto net = with_values(std::make_shared<SpecialModel>());
      scenario.net = [&] { return net; };
      scenario.options.exclude_layer = {net->norm.get()};
      ScenarioJob job(world, "p_g_os", scenario);
      job.train(0, scenario.steps);
      all[world.rank()] = {.losses = job.losses, .state = job.sharded.model.full_state()};
    });
    expect_close(collect(all, "p_g_os").state, os_g.state, 1e-6, 1e-6, on(ranks));
  }
}

// dygraph_group_sharded_stage2_offload.py and dygraph_group_sharded_stage3_offload.py. Their last
// step, `get_all_parameters(convert2cpu=True)`, is `full_state()`; all comparisons here use that.

void expect_same_bits_offloaded(const std::string& level, Scenario scenario) {
  const ScratchDirectory directory;
  const auto trained = [&](int ranks, std::variant<bool, std::string> offload) {
    scenario.options.offload = std::move(offload);
    return train(ranks, level, scenario);
  };
  for (const int ranks : {2, 4}) {
    const Trained expected = trained(ranks, false);
    expect_equal(trained(ranks, "cpu"), expected, on(ranks, level) + ", offload to cpu");
    expect_equal(trained(ranks, directory.path()), expected, on(ranks, level) + ", to files");
  }
  expect_equal(trained(2, true), trained(2, "none"), level + ", offload");
}

TEST(GroupShardedStage2, OffloadGivesTheSameBitsInFp16) {
  expect_same_bits_offloaded("os_g", {.o2 = at::kHalf, .init_scale = 1024, .steps = 4});
}

TEST(GroupShardedStage3, OffloadGivesTheSameBitsWithSeveralBackwardsPerStep) {
  expect_same_bits_offloaded("p_g_os", {.steps = 2, .parts = 5});
}

}  // namespace tessera::testing::group_sharded_scenario_stage3_test
