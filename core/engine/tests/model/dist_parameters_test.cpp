// Models whose parameters are DistTensors over one mesh dim, sharded over another.

#include <gtest/gtest.h>
#include <tessera/comm/process_group.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/engine/sharded_optimizer.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "engine/model/sharded_state.h"
#include "support/error_of.h"
#include "support/models.h"
#include "support/norm_mlp.h"

namespace tessera::testing::dist_parameters_test {

at::Tensor batch(int64_t rows, uint64_t seed) {
  return on_test_device(torch::randn({rows, 6}, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

at::Tensor loss_of(const at::Tensor& y) { return y.square().mean(); }

constexpr int kSteps = 4;
constexpr double kMaxNorm = 0.5;

// One process, on the whole batch: the parameters after training, and the norms of the gradients.
struct Result {
  std::vector<at::Tensor> parameters;
  std::vector<double> norms;
};

Result train_plain(int64_t rows) {
  Result result;
  NormMlp mlp = make_norm_mlp();
  torch::optim::AdamW optimizer(mlp->parameters(), torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(mlp(batch(rows, step))).backward();
    result.norms.push_back(nn::utils::clip_grad_norm_(mlp->parameters(), kMaxNorm));
    optimizer.step();
  }
  result.parameters = mlp->parameters();
  return result;
}

void expect_result(ShardedModule& model, const Result& expected) {
  const auto state = model.full_state();
  ASSERT_EQ(state.size(), expected.parameters.size());
  for (size_t i = 0; i < state.size(); ++i) {
    EXPECT_TRUE(torch::allclose(state[i].tensor, expected.parameters[i], 1e-5, 1e-6))
        << state[i].name;
  }
}

struct Case {
  ShardLevel level;
  int dp, tp;
};

class DistParameters : public ::testing::TestWithParam<Case> {};

TEST_P(DistParameters, OverAMeshDimOfTheirOwnTrainAsOneProcess) {
  const auto [level, dp, tp] = GetParam();
  run_world(dp * tp, [level = level, dp = dp, tp = tp](World&) {
    const auto mesh = DeviceMesh::over_world({dp, tp}, {"dp", "tp"});
    NormMlp mlp = make_norm_mlp();
    shard_columns_then_rows(mlp, mesh.sub_mesh("tp"));
    torch::optim::AdamW inner(mlp->parameters(), torch::optim::AdamWOptions(0.01));
    auto model = fully_shard(
        mlp,
        {.level = level, .unit_bytes = 200, .process_group = mesh.process_group(mesh.dim("dp"))});
    ShardedOptimizer optimizer(model, inner);
    const int64_t rows = 4;
    const Result expected = train_plain(rows * dp);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const auto own = batch(rows * dp, step).chunk(dp)[(*mesh.coordinate())[0]];
      loss_of(model(own)).backward();
      EXPECT_NEAR(optimizer.clip_grad_norm_(kMaxNorm), expected.norms[step],
                  1e-5 * expected.norms[step]);
      optimizer.step();
    }
    expect_result(model, expected);
    EXPECT_EQ(placements_of(mlp->up->weight), Placements{Shard{0}});
  });
}

TEST_P(DistParameters, OverADimOfTheirMeshTrainAsOneProcess) {
  const auto [level, dp, tp] = GetParam();
  run_world(dp * tp, [level = level, dp = dp, tp = tp](World&) {
    const auto mesh = DeviceMesh::over_world({dp, tp}, {"dp", "tp"});
    NormMlp mlp = make_norm_mlp();
    shard_columns_then_rows(mlp, mesh, {Replicate{}});
    torch::optim::AdamW inner(mlp->parameters(), torch::optim::AdamWOptions(0.01));
    auto model = fully_shard(mlp, {.level = level, .unit_bytes = 200, .mesh_dim = 0});
    ShardedOptimizer optimizer(model, inner);
    const int64_t rows = 4 * dp;
    const Result expected = train_plain(rows);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const auto x = distribute(batch(rows, step), mesh, {Shard{0}, Replicate{}});
      loss_of(model(x)).backward();
      EXPECT_NEAR(optimizer.clip_grad_norm_(kMaxNorm), expected.norms[step],
                  1e-5 * expected.norms[step]);
      optimizer.step();
    }
    expect_result(model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Mesh, DistParameters,
    ::testing::Values(Case{ShardLevel::kNone, 2, 2}, Case{ShardLevel::kOptimizerState, 2, 2},
                      Case{ShardLevel::kGradients, 2, 2}, Case{ShardLevel::kParameters, 2, 2},
                      Case{ShardLevel::kParameters, 1, 2}, Case{ShardLevel::kParameters, 2, 1},
                      Case{ShardLevel::kParameters, 1, 3}, Case{ShardLevel::kParameters, 3, 1}),
    [](const auto& info) {
      return "level" + std::to_string(static_cast<int>(info.param.level)) + "_" +
             std::to_string(info.param.dp) + "x" + std::to_string(info.param.tp);
    });

TEST(DistParameters, StateComesAndGoesWhole) {
  run_world(4, [](World&) {
    const auto mesh = DeviceMesh::over_world({2, 2}, {"dp", "tp"});
    NormMlp mlp = make_norm_mlp();
    const auto plain = make_norm_mlp();
    shard_columns_then_rows(mlp, mesh.sub_mesh("tp"));
    auto model = fully_shard(mlp, {.process_group = mesh.process_group(0)});
    auto state = model.full_state();
    for (NamedTensor& item : state) {
      EXPECT_TRUE(item.tensor.equal(plain->named_parameters()[item.name])) << item.name;
      item.tensor = item.tensor * 2;
    }
    model.load_full_state(state);
    const auto loaded = model.full_state();
    for (size_t i = 0; i < state.size(); ++i)
      EXPECT_TRUE(loaded[i].tensor.equal(state[i].tensor)) << state[i].name;
    loss_of(model(batch(4, 1))).backward();
    const at::Tensor gradient = model.full_grad("up.weight");
    EXPECT_EQ(gradient.sizes(), plain->up->weight.sizes());
    EXPECT_FALSE(is_dist(gradient));
  });
}

TEST(DistParameters, AnOverflowOnOnePartSkipsTheStepOnAll) {
  run_world(4, [](World& world) {
    const auto mesh = DeviceMesh::over_world({2, 2}, {"dp", "tp"});
    NormMlp mlp = make_norm_mlp();
    shard_columns_then_rows(mlp, mesh.sub_mesh("tp"));
    torch::optim::SGD inner(mlp->parameters(), torch::optim::SGDOptions(0.1));
    auto model = fully_shard(mlp, {.process_group = mesh.process_group(0)});
    ShardedOptimizer optimizer(model, inner);
    GradScaler scaler;
    const auto before = model.full_state();
    // Only the ranks with the second half of the columns overflow.
    mlp->up->weight.register_hook([&](const at::Tensor& gradient) {
      const at::Tensor local = to_local(gradient);
      return from_local(world.rank() % 2 == 1 ? local * INFINITY : local, mesh_of(gradient),
                        placements_of(gradient));
    });
    scaler.scale(loss_of(model(batch(4, 1)))).backward();
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 32768.0);
    const auto after = model.full_state();
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(after[i].tensor.equal(before[i].tensor)) << before[i].name;
  });
}

// The model holds weak pointers to its parameters, for which LibTorch keeps the state that makes
// them DistTensors: once the first parameter is gone, that state must release the model.
TEST(DistParameters, NothingIsKeptOnceModuleAndHandleAreGone) {
  for (const ShardLevel level : kAllLevels) {
    run_world(4, [&](World& world) {
      const auto mesh = DeviceMesh::over_world(world, {2, 2});
      std::weak_ptr<ShardedState> state;
      at::Tensor detached;
      {
        NormMlp mlp = make_norm_mlp();
        shard_columns_then_rows(mlp, mesh, {Replicate{}});
        mlp->parameters().front().set_requires_grad(false);
        auto model = fully_shard(mlp, {.level = level, .unit_bytes = 200, .mesh_dim = 0});
        torch::optim::AdamW inner(mlp->parameters(), torch::optim::AdamWOptions(0.01));
        ShardedOptimizer optimizer(model, inner);
        loss_of(mlp(distribute(batch(8, 1), mesh, {Shard{0}, Replicate{}}))).backward();
        optimizer.step();
        state = model.state();
        detached = mlp->parameters().back().detach();
      }
      EXPECT_FALSE(state.expired()) << "a tensor that shows a parameter keeps it";
      EXPECT_GE(full_tensor(detached).numel(), 1);
      detached.reset();
      EXPECT_TRUE(state.expired()) << "level " << static_cast<int>(level);
    });
  }
}

TEST(DistParameters, WhatDoesNotFitIsRefused) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const auto message_of = [](const std::function<void()>& f) -> std::string {
      try {
        f();
      } catch (const c10::ValueError& error) {
        return error.what_without_backtrace();
      }
      return "no error";
    };
    nn::Linear linear(4, 4);
    expect_contains(message_of([&] { fully_shard(linear, {.mesh_dim = 0}); }),
                    {"must be DistTensors"});
    distribute_(linear->weight, mesh, {Shard{0}});
    expect_contains(message_of([&] { fully_shard(linear, {.mesh_dim = 0}); }),
                    {"'weight' is placed"});
    distribute_(linear->bias, DeviceMesh({2}, {1, 0}), {});
    expect_contains(message_of([&] { fully_shard(linear); }), {"on one mesh"});
  });
}

TEST(DistParameters, RanksWithOtherPartsOfThemAreRefused) {
  run_world(4, [](World& world) {
    const auto mesh = DeviceMesh::over_world({2, 2}, {"dp", "tp"});
    const auto refuse = [](const NormMlp& mlp, const ShardPlan& plan) {
      expect_error([&] { fully_shard(mlp, plan); },
                   {"[fully_shard]", "the same parts of the DistTensors", "'up.weight'",
                    "plan.mesh_dim", "plan.process_group"});
    };
    for (const ShardLevel level : kAllLevels) {
      NormMlp mlp = make_norm_mlp();
      shard_columns_then_rows(mlp, mesh.sub_mesh("tp"));
      refuse(mlp, {.level = level});  // the ranks of the world
      refuse(mlp, {.level = level, .process_group = mesh.process_group(1)});
      const auto alone = world.new_process_group({world.rank()});
      const ShardPlan replicas{
          .level = level, .process_group = alone, .replicate_group = mesh.process_group(1)};
      refuse(mlp, replicas);
      // Nothing was changed.
      fully_shard(mlp, {.level = level, .process_group = mesh.process_group(0)});
      NormMlp placed = make_norm_mlp();
      shard_columns_then_rows(placed, mesh, {Replicate{}});
      refuse(placed, {.level = level});
      fully_shard(placed, {.level = level, .process_group = mesh.process_group(0)});
    }
  });
}

// Uneven cuts give ranks parts of other sizes.
TEST(DistParameters, RanksWithPartsOfOtherSizesAreRefusedForTheSameReason) {
  run_world(3, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    NormMlp mlp = make_norm_mlp();
    shard_columns_then_rows(mlp, mesh);
    expect_error([&] { fully_shard(mlp); }, {"the same parts of the DistTensors", "'up.weight'"});
  });
}

}  // namespace tessera::testing::dist_parameters_test
