// Effects of `group_sharded_parallel` on a model and its optimizer.
#include <gtest/gtest.h>

#include <numeric>

#include "dialects/tests/training.h"
#include "engine/model/sharded_state.h"

namespace tessera::testing::group_sharded_test {

using paddle::group_sharded_parallel;

// Computes the gradients of step 0 on this rank's rows.
template <class Model>
void backward(Model& model, const World& world) {
  accumulate({}, 0, world.rank(), world.size(), [&](const torch::Tensor& x) { return model(x); });
}

TEST(GroupSharded, GS_02_OptimizerOfAnotherModelAndModelWithoutParametersAreRefused) {
  run_world(2, [](World& world) {
    const auto net = make_mlp(), other = make_mlp();
    const auto refused = [&](const auto& model, torch::optim::Optimizer& optimizer) {
      return message_of<c10::ValueError>(
          [&] { group_sharded_parallel(model, optimizer, "p_g_os"); });
    };
    const auto wrong = make_sgd(*other), right = make_sgd(*net);
    expect_contains(refused(net, *wrong), {"the optimizer's parameters must be the model's"});
    expect_contains(refused(std::make_shared<torch::nn::GELUImpl>(), *wrong),
                    {"the model must have parameters"});
    auto twice = make_sgd(*net);
    twice->add_param_group(torch::optim::OptimizerParamGroup({net->parameters()[0]}));
    expect_contains(refused(net, *twice), {"a parameter must be in one param group"});
    torch::optim::LBFGS lbfgs(net->parameters());
    EXPECT_THROW(group_sharded_parallel(net, lbfgs, "p_g_os"), c10::NotImplementedError);
    // Wrong on one rank, refused on both.
    refused(net, world.rank() == 0 ? *wrong : *right);
    // Nothing was changed: the model is not sharded yet.
    auto [model, optimizer, scaler] = group_sharded_parallel(net, *right, "p_g_os");
    backward(model, world);
    optimizer.step();
  });
}

TEST(GroupSharded, GS_03_WorksOnTheCpu) {
  TESSERA_ON_HOST_ONLY("the CPU's backend");
  run_world(2, [](World& world) {
    const auto net = make_mlp();
    const auto inner = make_sgd(*net);
    auto [model, optimizer, scaler] = group_sharded_parallel(net, *inner, "p_g_os");
    backward(model, world);
    optimizer.step();
    EXPECT_EQ(world.process_group()->backend_name(), "gloo");
    for (const auto& param : net->parameters()) EXPECT_TRUE(param.is_cpu());
  });
}

TEST(GroupSharded, GS_05_OneRankTrainsAsOneProcess) {
  const auto expected = train_alone({});
  for (const std::string level : {"os", "os_g", "p_g_os"}) {
    expect_same_state(train_sharded(1, level, {}), expected, 0, level);
  }
  // Without a world, there is one rank.
  const auto net = make_mlp();
  const auto inner = make_sgd(*net);
  auto [model, optimizer, scaler] = group_sharded_parallel(net, *inner, "p_g_os");
  EXPECT_EQ(model.state()->process_group().size(), 1);
}

// A layer and a running statistic, with the rank's own values.
struct Counted : Net {
  explicit Counted(int rank)
      : fc(register_module("fc", torch::nn::Linear(kIn, kOut))),
        seen(register_buffer("seen", torch::full({3}, rank, torch::kFloat))) {}
  torch::Tensor forward(torch::Tensor x) override { return fc->forward(x); }
  torch::nn::Linear fc;
  torch::Tensor seen;
};

TEST(GroupSharded, GS_06_ParametersComeFromRankZeroAndBuffersOnlyIfAskedFor) {
  for (const int ranks : {2, 3}) {
    for (const bool sync : {false, true}) {
      run_world(ranks, [&](World& world) {
        const auto net = with_values(std::make_shared<Counted>(world.rank()), 100 + world.rank());
        const auto first = plain_state(*with_values(std::make_shared<Counted>(0), 100));
        const auto inner = make_sgd(*net);
        auto [model, optimizer, scaler] =
            group_sharded_parallel(net, *inner, "p_g_os", {.sync_buffers = sync});
        EXPECT_TRUE(same_values(net->fc->weight, first[0].tensor));
        EXPECT_TRUE(same_values(net->fc->bias, first[1].tensor));
        net->seen.fill_(10 + world.rank());
        model(on_test_device(torch::zeros({1, kIn})));
        EXPECT_EQ(net->seen[0].item<int>(), 10 + (sync ? 0 : world.rank()));
      });
    }
  }
}

TEST(GroupSharded, GS_07_EachParameterGoesWholeToTheLeastLoadedRank) {
  constexpr int kRanks = 3;
  run_world(kRanks, [](World& world) {
    const auto net = on_test_device(std::make_shared<PaddleMlp>());
    net->fc2->weight.set_requires_grad(false);
    std::vector<int64_t> load(kRanks);
    std::map<std::string, int> owner;
    for (const auto& item : net->named_parameters()) {
      const auto least = std::min_element(load.begin(), load.end());
      owner[item.key()] = static_cast<int>(least - load.begin());
      if (item.value().requires_grad()) *least += item.value().numel();  // frozen ones count as 0
    }
    const auto inner = make_sgd(*net);
    auto [model, optimizer, scaler] = group_sharded_parallel(net, *inner, "os_g");
    size_t own = 0;
    for (const auto& unit : model.state()->units()) {
      const auto& bounds = unit->layout().bounds;
      for (const ParamSlot& slot : unit->layout().slots) {
        EXPECT_GE(slot.offset, bounds[owner[slot.name()]]) << slot.name();
        EXPECT_LE(slot.offset + slot.numel, bounds[owner[slot.name()] + 1]) << slot.name();
        own += owner[slot.name()] == world.rank();
      }
    }
    // The inner optimizer has its own parameters in their shapes, and an empty placeholder for each
    // of the others.
    size_t held = 0;
    for (const auto& param : inner->param_groups()[0].params()) held += param.numel() > 0;
    EXPECT_EQ(held, own);
  });
}

TEST(GroupSharded, GS_08_ParametersOfOneDtypeAreAlignedViewsOfOneFlatBuffer) {
  run_world(2, [](World&) {
    const auto net = on_test_device(std::make_shared<PaddleMlp>(37));
    net->fc2->to(torch::kBFloat16);
    const auto inner = make_sgd(*net);
    auto [model, optimizer, scaler] = group_sharded_parallel(net, *inner, "os_g");
    std::map<at::ScalarType, const void*> storage;
    for (const auto& param : net->parameters()) {
      const void* own = param.storage().unsafeGetStorageImpl();
      EXPECT_EQ(storage.emplace(param.scalar_type(), own).first->second, own);
      EXPECT_EQ(param.storage_offset() * param.element_size() % 64, 0);
    }
    EXPECT_EQ(storage.size(), 2);
    EXPECT_NE(storage[at::kFloat], storage[at::kBFloat16]);
  });
}

TEST(GroupSharded, GS_09_ParametersAreTheSameBitsOnAllRanksAfterStep) {
  constexpr int kRanks = 3;
  for (const std::string level : {"os", "os_g", "p_g_os"}) {
    std::vector<std::vector<NamedTensor>> states(kRanks);
    run_world(kRanks, [&](World& world) {
      const auto net = make_mlp();
      const auto inner = make_adamw(*net);
      auto [model, optimizer, scaler] = group_sharded_parallel(net, *inner, level);
      backward(model, world);
      optimizer.step();
      states[world.rank()] = plain_state(*net);  // as a user would read them
    });
    for (const auto& state : states) expect_same_state(state, states[0], 0, level);
  }
}

TEST(GroupSharded, GS_10_GradientsAreTheMeanAndOnlyTheOwnersKeepThem) {
  const auto alone = make_mlp();
  accumulate({}, 0, 0, 1, [&](const torch::Tensor& x) { return alone->forward(x); });
  // In host memory: a rank that reads another device waits for what is queued there.
  std::map<std::string, torch::Tensor> expected;
  for (const auto& item : alone->named_parameters())
    expected[item.key()] = item.value().grad().cpu();
  for (const std::string level : {"os", "os_g"}) {
    for (const int ranks : {1, 2, 3}) {
      std::vector<int64_t> kept(ranks);
      run_world(ranks, [&](World& world) {
        const auto net = make_mlp();
        const auto inner = make_sgd(*net);
        auto [model, optimizer, scaler] = group_sharded_parallel(net, *inner, level);
        backward(model, world);
        for (const auto& [name, grad] : expected)
          EXPECT_TRUE(torch::allclose(model.full_grad(name).cpu(), grad, 1e-5, 1e-7));
        kept[world.rank()] = optimizer.memory().gradients;
        if (world.rank() > 0) return;
        int64_t whole = 0;
        for (const auto& unit : model.state()->units()) whole += unit->layout().nbytes();
        kept[0] -= whole;
      });
      EXPECT_EQ(std::accumulate(kept.begin(), kept.end(), int64_t{0}), 0) << level << ", " << ranks;
    }
  }
}

TEST(GroupSharded, GS_11_MinimizeIsRefused) {
  const auto net = make_mlp();
  const auto inner = make_sgd(*net);
  auto [model, optimizer, scaler] = group_sharded_parallel(net, *inner, "os_g");
  expect_contains(
      message_of<std::runtime_error>([&optimizer = optimizer] { optimizer.minimize({}); }),
      {"optimizer.minimize() not support now, please use optimizer.step()"});
}

TEST(GroupSharded, GS_12_ClippingUsesTheNormOfAllShards) {
  expect_parity({.options = {.segment_size = 100}, .clip = 0.05});
  const auto alone = make_mlp();
  accumulate({}, 0, 0, 1, [&](const torch::Tensor& x) { return alone->forward(x); });
  for (const double type : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
    const double norm = torch::nn::utils::clip_grad_norm_(alone->parameters(), 1e9, type);
    run_world(3, [&](World& world) {
      const auto net = make_mlp();
      const auto inner = make_sgd(*net);
      auto [model, optimizer, scaler] =
          group_sharded_parallel(net, *inner, "p_g_os", {.segment_size = 100});
      backward(model, world);
      EXPECT_NEAR(optimizer.clip_grad_norm_(1e9, type), norm, 1e-5 * norm);
    });
  }
}

TEST(GroupSharded, GS_13_LearningRatePassesThroughToTheInnerOptimizer) {
  run_world(2, [](World& world) {
    const auto net = make_mlp();
    const auto inner = make_sgd(*net);
    auto [model, optimizer, scaler] =
        group_sharded_parallel(net, *inner, "p_g_os", {.segment_size = 0});
    EXPECT_EQ(optimizer.get_lr(), 0.1);
    optimizer.set_lr(0);
    EXPECT_EQ(optimizer.get_lr(), 0);
    const auto before = model.full_state();
    backward(model, world);
    optimizer.step();
    expect_same_state(model.full_state(), before, 0, "learning rate 0");
    // A scheduler made for the inner optimizer still works.
    optimizer.set_lr(0.5);
    torch::optim::StepLR scheduler(*inner, 1, 0.5);
    for (int epoch = 0; epoch < 2; ++epoch) scheduler.step();  // the first one changes nothing
    EXPECT_EQ(optimizer.get_lr(), 0.25);
  });
}

}  // namespace tessera::testing::group_sharded_test
