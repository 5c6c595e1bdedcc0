// Writes of operators to parameters that have master copies.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

#include "support/models.h"

namespace tessera::testing::master_write_test {

// A loss whose gradient is 1 for each element of `weight`.
struct Scaled : torch::nn::Module {
  Scaled() {
    weight = register_parameter("weight", torch::ones({11}));
    logit_scale = register_parameter("logit_scale", torch::full({1}, 2.));
  }
  torch::Tensor loss() { return weight.sum() + 0 * logit_scale.sum(); }
  torch::Tensor weight, logit_scale;
};

const std::map<std::string, Precision> kPrecisions = {
    {"param_dtype", {.param_dtype = torch::kBFloat16}},
    {"master_dtype", {.master_dtype = torch::kFloat}},
    {"master_only", {.param_dtype = torch::kBFloat16, .master_only = true}},
    {"gather_dtype", {.gather_dtype = torch::kBFloat16}}};

// Forty steps from 1 to 0.97, none of which bfloat16 could make, with `write` after each.
// Returns the state after them.
std::map<std::string, torch::Tensor> train(World&, const std::string& name, const ShardPlan& plan,
                                           const std::function<void(Scaled&)>& write) {
  const auto model = std::make_shared<Scaled>();
  if (name == "master_dtype") model->to(torch::kBFloat16);
  torch::optim::SGD inner(model->parameters(), 7.5e-4);
  auto sharded = fully_shard(std::shared_ptr<torch::nn::Module>(model), plan);
  ShardedOptimizer optimizer(sharded, inner);
  for (int step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    model->loss().backward();
    optimizer.step();
    torch::NoGradGuard no_grad;
    write(*model);
  }
  std::map<std::string, torch::Tensor> state;
  for (const auto& item : sharded.full_state()) state[item.name] = item.tensor.to(torch::kFloat);
  return state;
}

void for_each_plan(const std::function<void(World&, const std::string&, const ShardPlan&)>& run) {
  for (const auto transport : kTransports) {
    for (const int ranks : {1, 2, 3}) {
      run_over(
          transport, ranks,
          [&](World& world) {
            for (const auto& [name, precision] : kPrecisions) {
              for (const auto level : kAllLevels) {
                SCOPED_TRACE(fmt::format("{}, level {}, {} ranks, transport {}", name,
                                         static_cast<int>(level), ranks,
                                         static_cast<int>(transport)));
                run(world, name, {.level = level, .precision = precision});
              }
            }
          },
          std::chrono::seconds(60));
    }
  }
}

// The gather that follows a step, which nothing has waited for, must not undo the next one.
TEST(MasterWrites, StepsThatFollowEachOtherAreAllSeen) {
  for_each_plan([](World&, const std::string& name, const ShardPlan& plan) {
    const auto model = std::make_shared<Scaled>();
    if (name == "master_dtype") model->to(torch::kBFloat16);
    torch::optim::SGD first({model->weight}, 0.25), second({model->logit_scale}, 0.25);
    auto sharded = fully_shard(std::shared_ptr<torch::nn::Module>(model), plan);
    ShardedOptimizer steps_first(sharded, first), steps_second(sharded, second);
    (model->loss() + model->logit_scale.sum()).backward();
    steps_second.step();
    steps_first.step();
    EXPECT_EQ(model->weight.sum().item<float>(), 11 * 0.75);
    EXPECT_EQ(model->logit_scale.sum().item<float>(), 1.75);
  });
}

TEST(MasterWrites, AWriteToOneParameterLeavesTheMastersOfOthers) {
  for_each_plan([](World& world, const std::string& name, const ShardPlan& plan) {
    const auto state =
        train(world, name, plan, [](Scaled& model) { model.logit_scale.clamp_(0., 1.5); });
    EXPECT_NEAR(state.at("weight").min().item<float>(), 0.97, 0.003);
    EXPECT_NEAR(state.at("weight").max().item<float>(), 0.97, 0.003);
    EXPECT_EQ(state.at("logit_scale").item<float>(), 1.5);
  });
}

TEST(MasterWrites, AWriteThatChangesNoValueKeepsItsMaster) {
  for_each_plan([](World& world, const std::string& name, const ShardPlan& plan) {
    const auto state = train(world, name, plan, [](Scaled& model) { model.weight.clamp_(0., 2.); });
    EXPECT_NEAR(state.at("weight").min().item<float>(), 0.97, 0.003);
    EXPECT_NEAR(state.at("weight").max().item<float>(), 0.97, 0.003);
  });
}

TEST(MasterWrites, WrittenElementsReachTheirMastersAndNoOthers) {
  for_each_plan([](World& world, const std::string& name, const ShardPlan& plan) {
    const auto state =
        train(world, name, plan, [](Scaled& model) { model.weight.narrow(0, 4, 3).fill_(0.5); });
    const torch::Tensor weight = state.at("weight");
    for (int i = 0; i < 11; ++i)
      EXPECT_NEAR(weight[i].item<float>(), i >= 4 && i < 7 ? 0.5 : 0.97, 0.003) << i;
  });
}

TEST(MasterWrites, MastersOfOffloadedUnitsStayToo) {
  run_world(2, [](World& world) {
    const auto state =
        train(world, "offload",
              {.precision = {.param_dtype = torch::kBFloat16}, .offload = Offload::kHost},
              [](Scaled& model) { model.logit_scale.clamp_(0., 1.5); });
    EXPECT_NEAR(state.at("weight").mean().item<float>(), 0.97, 0.003);
  });
}

}  // namespace tessera::testing::master_write_test
