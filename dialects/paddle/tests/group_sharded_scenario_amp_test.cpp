// Paddle's own tests of automatic mixed precision at levels os and os_g: O1 (float parameters,
// autocast) and O2 (parameters in half precision, float masters) with main_grad (gradients that are
// sent and summed in float), and fused buffers.
#include <gtest/gtest.h>

#include "dialects/paddle/tests/scenario.h"

namespace tessera::testing::group_sharded_scenario_amp_test {

constexpr at::ScalarType kHalves[] = {at::kBFloat16, at::kHalf};

Scenario o2_scenario(at::ScalarType dtype, bool main_grad = true) {
  Scenario scenario{.o2 = dtype, .init_scale = dtype == at::kHalf ? 1024.0 : 0};
  if (main_grad) scenario.options.precision.reduce_dtype = at::kFloat;
  return scenario;
}

// Starts from values that half precision holds, as O2 does.
Scenario o1_scenario(at::ScalarType dtype) {
  return {.net =
              [dtype] {
                const auto net = make_mlp();
                net->to(dtype);
                net->to(torch::kFloat);
                return net;
              },
          .o1 = dtype,
          .init_scale = dtype == at::kHalf ? 1024.0 : 0};
}

std::vector<NamedTensor> rounded(std::vector<NamedTensor> state, at::ScalarType dtype) {
  for (auto& item : state) item.tensor = item.tensor.to(dtype);
  return state;
}

// dygraph_group_sharded_stage2_bf16.py, dygraph_group_sharded_stage1_{fp16,bf16}.py

TEST(GroupShardedAmp, O1AndO2WithMainGradHaveTheSameLossesToTheBit) {
  for (const auto dtype : kHalves) {
    for (const int ranks : {2, 4}) {
      for (const std::string level : {"os", "os_g"}) {
        const Trained o1 = train(ranks, level, o1_scenario(dtype));
        const Trained o2 = train(ranks, level, o2_scenario(dtype));
        const auto what = c10::toString(dtype) + on(ranks, level);
        EXPECT_EQ(o1.losses, o2.losses) << what;
        EXPECT_NE(o2.losses.front(), o2.losses.back()) << what;
        expect_same_state(rounded(o1.state, dtype), o2.state, 0, what);
      }
    }
  }
}

// The user's model stays float here: `param_dtype` does the conversion of O2.
TEST(GroupShardedAmp, O1AndAParamDtypeHaveTheSameLossesToTheBit) {
  for (const auto dtype : kHalves) {
    Scenario o1{.o1 = dtype}, o2{};
    o2.options.precision = {
        .param_dtype = dtype, .master_dtype = at::kFloat, .reduce_dtype = at::kFloat};
    for (const int ranks : {2, 4}) {
      EXPECT_EQ(train(ranks, "os_g", o1).losses, train(ranks, "os_g", o2).losses)
          << dtype << on(ranks);
    }
  }
}

TEST(GroupShardedAmp, O2IsWhatOneProcessWithFloatMastersGives) {
  for (const auto dtype : kHalves) {
    for (const bool main_grad : {false, true}) {
      const Scenario scenario = o2_scenario(dtype, main_grad);
      for (const int ranks : {2, 4}) {
        const auto what = c10::toString(dtype) + on(ranks);
        const Trained alone = train_alone(ranks, scenario), os_g = train(ranks, "os_g", scenario);
        const bool rounds = rounds_sums() && !main_grad;
        expect_close(os_g.state, alone.state, 1e-4, rounds ? kRoundedState : 1e-3, what);
        expect_close_losses(os_g, alone, rounds ? kRoundedLoss : 1e-4, what);
      }
    }
  }
}

TEST(GroupShardedAmp, SingleBuffersGiveTheBitsOfFusedOnes) {
  for (const std::optional<at::ScalarType> dtype :
       {std::optional(at::kBFloat16), std::optional(at::kHalf), std::optional<at::ScalarType>()}) {
    for (const int ranks : {2, 4}) {
      Scenario fused = dtype ? o2_scenario(*dtype) : Scenario{}, single = fused;
      single.options.buffer_max_size = 0;
      expect_equal(train(ranks, "os_g", single), train(ranks, "os_g", fused), on(ranks));
    }
  }
}

TEST(GroupShardedAmp, TheScalerIsTheOneThatWasGivenAndChangesNoBit) {
  Scenario plain = o2_scenario(at::kBFloat16);
  plain.options.grad_clip = {};
  Scenario scaled = plain;
  scaled.init_scale = 1024;
  for (const int ranks : {2, 4}) {
    expect_equal(train(ranks, "os_g", scaled), train(ranks, "os_g", plain), on(ranks));
    run_world(ranks, [&](World& world) {
      ScenarioJob job(world, "os_g", scaled);
      EXPECT_EQ(job.sharded.scaler, &job.scaler);
      EXPECT_EQ(job.sharded.optimizer.scaler(), &job.scaler);
      job.train(0, 2);
      EXPECT_EQ(job.scaler.get_scale(), 1024);
      EXPECT_EQ(job.sharded.optimizer.steps(), 2);
    });
  }
}

TEST(GroupShardedAmp, AScaleThatOverflowsIsHalvedOnAllRanksAlike) {
  Scenario scenario{.o2 = at::kHalf, .init_scale = std::pow(2.0, 22), .steps = 10};
  if (rounds_sums()) scenario.options.precision.reduce_dtype = at::kFloat;
  for (const int ranks : {2, 4}) {
    const Trained alone = train_alone(ranks, scenario);
    for (const std::string level : {"os", "os_g", "p_g_os"}) {
      expect_close(train(ranks, level, scenario).state, alone.state, 1e-4, 1e-3, on(ranks, level));
    }
    run_world(ranks, [&](World& world) {
      ScenarioJob job(world, "os_g", scenario);
      job.train(0, scenario.steps);
      EXPECT_LT(job.scaler.get_scale(), scenario.init_scale);
      EXPECT_GT(job.sharded.optimizer.steps(), 0);
      EXPECT_LT(job.sharded.optimizer.steps(), scenario.steps);
    });
  }
}

// dygraph_group_sharded_stage1_*.py: reduce_avg, comm_overlap and tensor_fusion

// The mean over ranks is taken when sums are stored. That loses no bit where it is exact.
TEST(GroupShardedStage1, SumsOfAveragedLossesGiveTheBitsOfMeans) {
  for (const int ranks : {2, 4}) {
    std::vector<std::vector<NamedTensor>> states(2);
    run_world(ranks, [&](World& world) {
      for (const bool average : {true, false}) {
        const Scenario scenario;
        const auto net = make_net(scenario);
        const auto inner = scenario.optimizer(*net);
        ShardPlan plan = paddle::group_sharded_plan(*net, "os", scenario.options);
        plan.average = average;
        auto model = fully_shard(net, plan);
        ShardedOptimizer optimizer(model, *inner,
                                   paddle::group_sharded_optimizer_options(scenario.options));
        for (int step = 0; step < scenario.steps; ++step) {
          optimizer.zero_grad();
          const auto loss = scenario_loss(scenario, step, world.rank(), ranks, 0,
                                          [&](const torch::Tensor& x) { return model(x); });
          (average ? loss : loss / ranks).backward();
          optimizer.step();
        }
        const auto state = model.full_state();
        if (world.rank() == 0) states[average] = state;
      }
    });
    expect_same_state(states[0], states[1], 0, on(ranks));
  }
}

TEST(GroupShardedStage1, LateCollectivesAndSingleBuffersChangeNoBit) {
  for (const int ranks : {2, 4}) {
    for (const auto dtype : kHalves) {
      const Scenario fused = o2_scenario(dtype);
      Scenario late = fused;
      late.options.buffer_max_size = 0;
      late.place = [](World& world, paddle::GroupShardedOptions& options) {
        options.group = late_process_group(world);
      };
      expect_equal(train(ranks, "os", late), train(ranks, "os", fused), on(ranks));
    }
  }
}

}  // namespace tessera::testing::group_sharded_scenario_amp_test
