// Param groups that the user changes after the optimizer was wrapped.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera {
namespace param_groups_test {

using namespace testing;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

constexpr int kThawsAt = 2, kSteps = 5;

std::shared_ptr<Mlp> half_frozen() {
  const auto net = seeded(7, [] { return std::make_shared<Mlp>(37, 3, 5); });
  for (auto& layer : net->fcs)
    for (auto& parameter : layer->parameters()) parameter.set_requires_grad(false);
  return net;
}

std::vector<torch::Tensor> frozen_of(Mlp& net) {
  std::vector<torch::Tensor> parameters;
  for (auto& layer : net.fcs)
    for (auto& parameter : layer->parameters()) parameters.push_back(parameter);
  return parameters;
}

std::vector<torch::Tensor> trained_of(Mlp& net) {
  std::vector<torch::Tensor> parameters;
  for (auto& parameter : net.parameters())
    if (parameter.requires_grad()) parameters.push_back(parameter);
  return parameters;
}

void thaw(Mlp& net, torch::optim::Optimizer& optimizer) {
  const auto parameters = frozen_of(net);
  for (const auto& parameter : parameters) parameter.set_requires_grad(true);
  optimizer.add_param_group(
      OptimizerParamGroup(parameters, std::make_unique<AdamWOptions>(AdamWOptions(3e-3))));
}

// All ranks see the same rows, so that means are those of one process.
torch::Tensor loss_of(Mlp& net, int step) {
  const Batch batch = global_batch(step, 12, 37, 5);
  return torch::mse_loss(net.forward(batch.x), batch.y);
}

std::vector<NamedTensor> thawed_alone() {
  const auto net = half_frozen();
  AdamW inner(trained_of(*net), AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    if (step == kThawsAt) thaw(*net, inner);
    inner.zero_grad();
    loss_of(*net, step).backward();
    inner.step();
  }
  return plain_state(*net);
}

TEST(ParamGroups, AnAddedOneIsSteppedAsInOneProcess) {
  const auto expected = thawed_alone();
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto level : kAllLevels) {
      run_world(ranks, [&](World&) {
        const auto net = half_frozen();
        AdamW inner(trained_of(*net), AdamWOptions(1e-2));
        auto sharded = fully_shard(net, {.level = level, .unit_bytes = 6000});
        ShardedOptimizer optimizer(sharded, inner, {.fused = false});
        for (int step = 0; step < kSteps; ++step) {
          if (step == kThawsAt) thaw(*net, optimizer.inner());
          optimizer.zero_grad();
          loss_of(*net, step).backward();
          optimizer.step();
        }
        expect_same_state(sharded.full_state(), expected, tolerance_of(ranks),
                          fmt::format("level {}, {} ranks", static_cast<int>(level), ranks));
      });
    }
  }
}

TEST(ParamGroups, AnAddedOneIsInCheckpoints) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    std::vector<NamedTensor> states[2];
    for (const bool resumes : {false, true}) {
      const auto net = half_frozen();
      AdamW inner(trained_of(*net), AdamWOptions(1e-2));
      auto sharded = fully_shard(net, {.unit_bytes = 6000});
      ShardedOptimizer optimizer(sharded, inner, {.fused = false});
      thaw(*net, optimizer.inner());
      // No step has seen the new group yet.
      if (resumes) load_checkpoint(scratch / "at_2", sharded, &optimizer);
      for (int step = resumes ? 2 : 0; step < kSteps; ++step) {
        if (step == 2 && !resumes) save_checkpoint(scratch / "at_2", sharded, &optimizer);
        optimizer.zero_grad();
        loss_of(*net, step).backward();
        optimizer.step();
      }
      states[resumes] = sharded.full_state();
    }
    expect_same_state(states[1], states[0], 0, "resumed");
  });
}

TEST(ParamGroups, AnAddedOneIsClippedAndOffloaded) {
  run_world(2, [&](World&) {
    const auto net = half_frozen();
    AdamW inner(trained_of(*net), AdamWOptions(1e-2));
    auto sharded = fully_shard(net, {.unit_bytes = 6000, .offload = Offload::kHost});
    ShardedOptimizer optimizer(sharded, inner, {.max_grad_norm = 0.1});
    thaw(*net, optimizer.inner());
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      loss_of(*net, step).backward();
      optimizer.step();
    }
    // Two moments of all parameters, of which this rank has half; all are offloaded.
    int64_t numel = 0;
    for (const auto& parameter : net->parameters()) numel += parameter.numel();
    EXPECT_GE(optimizer.memory().offloaded, 3 * 4 * numel / 2 * 0.9);
    EXPECT_EQ(optimizer.memory().optimizer_state, 0);
  });
}

TEST(ParamGroups, AddedParametersMustBeTheModelsAndInNoOtherGroup) {
  run_world(2, [&](World&) {
    const auto net = half_frozen();
    AdamW inner(trained_of(*net), AdamWOptions(1e-2));
    auto sharded = fully_shard(net);
    ShardedOptimizer optimizer(sharded, inner);
    loss_of(*net, 0).backward();
    optimizer.inner().add_param_group(OptimizerParamGroup({net->head->weight}));
    expect_error([&] { optimizer.step(); }, {"must be in one param group", "head.weight"});
    optimizer.inner().param_groups().pop_back();
    optimizer.inner().add_param_group(
        OptimizerParamGroup({torch::ones({3}, torch::requires_grad())}));
    expect_error([&] { optimizer.step(); }, {"must be the model's", "param group 1"});
    optimizer.inner().param_groups().pop_back();
    optimizer.step();
  });
}

TEST(ParamGroups, ARemovedParameterIsLeftAlone) {
  run_world(2, [&](World&) {
    const auto net = seeded(7, [] { return std::make_shared<Mlp>(37, 3, 5); });
    const auto before = plain_state(*net);
    torch::optim::SGD inner(net->parameters(), 0.1);
    auto sharded = fully_shard(net);
    ShardedOptimizer optimizer(sharded, inner);
    inner.param_groups()[0].params().erase(inner.param_groups()[0].params().begin());
    loss_of(*net, 0).backward();
    optimizer.step();
    const auto after = sharded.full_state();
    EXPECT_TRUE(same_values(after[0].tensor, before[0].tensor)) << before[0].name;
    EXPECT_FALSE(same_values(after[1].tensor, before[1].tensor)) << before[1].name;
  });
}

}  // namespace param_groups_test
}  // namespace tessera
