// Which layers `p_g_os` gathers and when, and which stay whole.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "dialects/paddle/tests/scenario.h"
#include "engine/model/sharded_state.h"

namespace tessera::testing::group_sharded_layers_test {

using paddle::group_sharded_parallel;

// The level of each parameter's unit.
std::map<std::string, ShardLevel> levels_of(const ShardedModule& model) {
  std::map<std::string, ShardLevel> levels;
  for (const auto& unit : model.state()->units()) {
    for (const ParamSlot& slot : unit->layout().slots) levels[slot.name()] = unit->layout().level;
  }
  return levels;
}

// Uses its two inner layers in the order given by `b_first`.
struct Switched : Net {
  Switched()
      : in(register_module("in", torch::nn::Linear(kIn, 16))),
        a(register_module("a", torch::nn::Linear(16, 16))),
        b(register_module("b", torch::nn::Linear(16, 16))),
        out(register_module("out", torch::nn::Linear(16, kOut))) {}
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::tanh(in->forward(x));
    x = torch::tanh((b_first ? b : a)->forward(x));
    return out->forward(torch::tanh((b_first ? a : b)->forward(x)));
  }
  torch::nn::Linear in, a, b, out;
  bool b_first = false;
};

TEST(GroupSharded, GS_24_AChangedOrderOfLayersStaysRight) {
  Training training{.steps = 6};
  training.net = [] { return with_values(std::make_shared<Switched>()); };
  training.before_step = [](Net& net, int step) {
    dynamic_cast<Switched&>(net).b_first = step % 3 == 1;
  };
  for (const bool sync_comm : {false, true}) {
    training.options = {.buffer_max_size = 0, .segment_size = 0, .sync_comm = sync_comm};
    expect_parity(training);
  }
}

TEST(GroupSharded, GS_24_OnlyTheLayersInUseAreGathered) {
  run_world(2, [](World& world) {
    const auto net = with_values(std::make_shared<Switched>());
    const auto inner = make_sgd(*net);
    auto [model, optimizer, scaler] = group_sharded_parallel(
        net, *inner, "p_g_os", {.buffer_max_size = 0, .segment_size = 0, .sync_comm = true});
    accumulate({}, 0, world.rank(), world.size(),
               [&model = model](const torch::Tensor& x) { return model(x); });
    optimizer.step();
    int64_t whole = 0, largest = 0;
    for (const auto& unit : model.state()->units()) {
      whole += unit->layout().nbytes();
      largest = std::max(largest, unit->layout().nbytes());
    }
    EXPECT_EQ(optimizer.memory().parameters, whole / 2);
    EXPECT_GE(optimizer.memory().peak_unsharded, largest);
    EXPECT_LE(optimizer.memory().peak_unsharded, 2 * largest);
  });
}

// A layer without a weight of its own.
struct Borrowing : torch::nn::Module {
  explicit Borrowing(const torch::Tensor& of) : weight(register_parameter("weight", of)) {}
  torch::Tensor weight;
};
struct Tied : Net {
  Tied()
      : first(register_module("first", torch::nn::Linear(kIn, kIn))),
        second(register_module("second", std::make_shared<Borrowing>(first->weight))),
        out(register_module("out", torch::nn::Linear(kIn, kOut))) {}
  torch::Tensor forward(torch::Tensor x) override {
    return out->forward(torch::tanh(torch::linear(torch::tanh(first->forward(x)), second->weight)));
  }
  torch::nn::Linear first;
  std::shared_ptr<Borrowing> second;
  torch::nn::Linear out;
};

std::unique_ptr<torch::optim::Optimizer> make_sgd_without_ties(Net& net) {
  return std::make_unique<torch::optim::SGD>(distinct_parameters(net),
                                             torch::optim::SGDOptions(0.1));
}

TEST(GroupSharded, GS_25_TiedWeightsNeedNoList) {
  Training training;
  training.net = [] { return with_values(std::make_shared<Tied>()); };
  training.optimizer = make_sgd_without_ties;
  for (const int64_t buffer_max_size : {0, 1 << 23}) {
    training.options = {.buffer_max_size = buffer_max_size, .segment_size = 0};
    const auto expected = train_alone(training);
    Training listed_twice = training;
    listed_twice.optimizer = make_sgd;
    for (const std::string level : {"os_g", "p_g_os"}) {
      expect_same_state(train_sharded(2, level, training), expected, 2e-6, level);
      expect_same_state(train_sharded(3, level, listed_twice), expected, 2e-6, level);
    }
  }
}

TEST(GroupSharded, GS_26_FrozenParametersAboveTheSegmentSizeAreSharded) {
  Training training{.options = {.segment_size = 40}};
  training.net = [] {
    auto net = with_values(std::make_shared<PaddleMlp>());
    for (auto& param : net->fc2->parameters()) param.set_requires_grad(false);
    return net;
  };
  expect_parity(training);
  run_world(2, [&](World&) {
    const auto net = training.net();
    const auto inner = make_sgd(*net);
    const auto model = group_sharded_parallel(net, *inner, "p_g_os", training.options).model;
    const auto levels = levels_of(model);
    EXPECT_EQ(levels.at("fc2.weight"), ShardLevel::kParameters);
    EXPECT_EQ(levels.at("fc2.bias"),
              ShardLevel::kGradients);  // 40 elements: not more than the bound
    EXPECT_EQ(levels.at("fc1.weight"), ShardLevel::kParameters);
    EXPECT_EQ(levels.at("fc3.bias"), ShardLevel::kGradients);
  });
}

TEST(GroupSharded, GS_29_ASharedLinearTrainsBesideAnExcludedGroupNorm) {
  Training training;
  training.net = [] { return with_values(std::make_shared<SpecialModel>()); };
  training.optimizer = make_sgd_without_ties;
  training.options = {.segment_size = 0, .exclude_layer = {"GroupNorm"}};
  expect_parity(training);
  run_world(2, [&](World&) {
    auto options = training.options;
    const auto net = on_test_device(std::make_shared<SpecialModel>());
    options.exclude_layer = {net->norm.get()};
    const auto inner = make_sgd(*net);
    const auto model = group_sharded_parallel(net, *inner, "p_g_os", options).model;
    for (const auto& [name, level] : levels_of(model)) {
      const bool is_whole = name.starts_with("norm.");
      EXPECT_EQ(level, is_whole ? ShardLevel::kGradients : ShardLevel::kParameters) << name;
    }
  });
}

}  // namespace tessera::testing::group_sharded_layers_test
