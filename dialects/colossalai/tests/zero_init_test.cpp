// ZeroInitContext, no_shard_zero_context and the shard strategies.
#include <tessera/comm/process_group_decorators.h>

#include <set>

#include "dialects/colossalai/tests/colossalai.h"
#include "engine/model/sharded_state.h"
#include "support/scratch_directory.h"

namespace tessera::testing::zero_init_test {

size_t units_of(const ShardedModule& module) { return module.state()->units().size(); }

TEST(ZeroInit, CO_01_ModelsMustBeBuiltInAContext) {
  run_world(2, [](World& world) {
    expect_error([] { ShardedModelV2<Tower>(eager_net<Tower>(), kTensor); },
                 {"You must use ZeroInitContext to init your module first", "first.weight"});
    // On one rank only: all ranks report it.
    Tower net = world.rank() == 0 ? zero_net<Tower>() : eager_net<Tower>();
    expect_error([&] { ShardedModelV2<Tower>(net, kTensor); }, {"You must use ZeroInitContext"});
    Tower converted = zero_net<Tower>();
    converted->second->to(torch::kDouble);
    expect_error([&] { ShardedModelV2<Tower>(converted, kTensor); },
                 {"second.weight", "Module::to()"});
  });
}

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    sharded = register_parameter("sharded", torch::randn({4, 4}));
    const auto context = no_shard_zero_context();
    whole = register_parameter("whole", torch::randn({4}));
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(sharded) + whole; }
  at::Tensor sharded, whole;
};
TORCH_MODULE(Mixed);

TEST(ZeroInit, CO_01_AModuleIsShardedOrNot) {
  run_world(2, [](World&) {
    expect_error([] { ShardedModelV2<Mixed>(zero_net<Mixed>(), kTensor); },
                 {"nn.Module can not both have shard param and unshard param", "'whole'"});
  });
}

TEST(ZeroInit, CO_01_ModelsDoNotNest) {
  run_world(2, [](World&) {
    Tower net = zero_net<Tower>();
    const ShardedModelV2<torch::nn::Linear> inner(net->first, kTensor);
    expect_error([&] { ShardedModelV2<Tower>(net, kTensor); },
                 {"Nested ShardedModelV2 is not supported", "first.weight"});
  });
}

TEST(ZeroInit, CO_02_ParametersAndBuffersAreOfTheContextsDtype) {
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat}) {
    run_world(3, [&](World& world) {
      Tower plain = eager_net<Tower>();
      ShardedModelV2<Tower> model(zero_net<Tower>({.shard_param = true, .param_dtype = dtype}),
                                  kTensor);
      for (const at::Tensor& param : model->parameters()) EXPECT_EQ(param.scalar_type(), dtype);
      EXPECT_EQ(model->offset.scalar_type(), dtype);
      EXPECT_EQ(model->calls.scalar_type(), torch::kLong);
      EXPECT_EQ(model->first->weight.device(), test_device());
      plain->to(dtype);
      plain->calls.set_data(plain->calls.to(torch::kLong));
      expect_same_state(model.state_dict(), plain_state(*plain), 0, "start");
      expect_same_bits(world, model.state_dict());
    });
  }
}

TEST(ZeroInit, CO_02_ElementsAreCounted) {
  for (const bool on_the_fly : {true, false}) {
    for (const at::ScalarType dtype : {torch::kLong, torch::kInt}) {
      const at::Tensor numel = torch::zeros({1}, dtype);
      const ZeroInitOptions options{.rm_torch_payload_on_the_fly = on_the_fly,
                                    .model_numel_tensor = numel};
      int64_t expected = 0;
      for (const at::Tensor& param : eager_net<Tower>()->parameters()) expected += param.numel();
      Tower net = zero_net<Tower>(options);
      EXPECT_EQ(numel.item<int64_t>(), expected);
      Twice twice = zero_net<Twice>(options);
      for (const at::Tensor& param : twice->parameters()) expected += param.numel();
      EXPECT_EQ(numel.item<int64_t>(), expected);
      EXPECT_EQ(numel.scalar_type(), dtype);
    }
  }
}

TEST(ZeroInit, CO_02_ACountThatDoesNotFitStaysTheLargestNumber) {
  const int64_t most = std::numeric_limits<int32_t>::max();
  const at::Tensor numel = torch::full({1}, most - 5, torch::kInt);
  zero_net<Tower>({.model_numel_tensor = numel});
  EXPECT_EQ(numel.item<int64_t>(), most);
}

struct WideImpl : torch::nn::Module {
  WideImpl() : fc(register_module("fc", torch::nn::Linear(300, 100))) {
    // Initializes once more, as some constructors do.
    const torch::NoGradGuard no_grad;
    fc->weight.normal_(0, 0.02);
  }
  at::Tensor forward(const at::Tensor& x) { return fc(x); }
  torch::nn::Linear fc;
};
TORCH_MODULE(Wide);

TEST(ZeroInit, CO_02_ParametersHaveNoMemoryBeforeTheyAreSharded) {
  Wide deferred = zero_net<Wide>();
  EXPECT_TRUE(is_deferred(deferred->fc->weight));
  EXPECT_TRUE(same_values(deferred->fc->weight, eager_net<Wide>()->fc->weight));
  Wide eager = zero_net<Wide>({.rm_torch_payload_on_the_fly = false});
  EXPECT_FALSE(is_deferred(eager->fc->weight));
  run_world(2, [&](World&) {
    for (const bool on_the_fly : {true, false}) {
      ShardedModelV2<Wide> model(
          zero_net<Wide>({.shard_param = true, .rm_torch_payload_on_the_fly = on_the_fly}),
          kTensor);
      Wide plain = eager_net<Wide>();
      plain->to(torch::kHalf);
      expect_same_state(model.state_dict(), plain_state(*plain), 0, "start");
    }
  });
}

TEST(ZeroInit, CO_02_OptionsMustFit) {
  const auto context = [](const ZeroInitOptions& options, const ShardStrategyPtr& strategy) {
    ZeroInitContext(test_device(), strategy, options);
  };
  expect_error([&] { context({}, nullptr); }, {"shard_strategy"});
  expect_error([&] { context({.param_dtype = torch::kDouble}, kTensor); },
               {"param_dtype", "Double"});
  expect_error([&] { context({.model_numel_tensor = torch::zeros({2})}, kTensor); },
               {"model_numel_tensor", "2 of Float"});
  expect_error([&] { ZeroInitContext(torch::Device("meta"), kTensor); }, {"target_device", "meta"});
  ZeroInitContext outer(test_device(), kTensor);
  expect_error([&] { context({}, kTensor); }, {"must not be in another"});
}

// Experts of a mixture: each rank has its own.
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    gate = register_module("gate", torch::nn::Linear(6, 6));
    const auto context = no_shard_zero_context(/*is_replicated=*/false);
    expert = register_module("expert", torch::nn::Linear(6, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return expert(torch::tanh(gate(x))); }
  torch::nn::Linear gate{nullptr}, expert{nullptr};
};
TORCH_MODULE(Experts);

// In one process: the gate gets the mean over all ranks' rows, an expert only that of its own rows.
void step_experts(std::vector<Experts>& nets, int64_t step) {
  const int ranks = static_cast<int>(nets.size());
  for (int rank = 0; rank < ranks; ++rank) tower_loss(*nets[rank], step, rank, ranks).backward();
  torch::NoGradGuard no_grad;
  for (const char* name : {"gate.weight", "gate.bias"}) {
    at::Tensor sum;
    for (const Experts& net : nets) {
      const at::Tensor grad = net->named_parameters()[name].grad();
      sum = sum.defined() ? sum + grad : grad;
    }
    for (const Experts& net : nets) net->named_parameters()[name].mutable_grad() = sum / ranks;
  }
}

TEST(ZeroInit, CO_03_ExpertsAreEachRanksOwn) {
  const ScratchDirectory directory;
  for (const int ranks : {1, 2, 3}) {
    for (const auto& strategy : {kTensor, kBucket}) {
      run_world(ranks, [&](World& world) {
        std::vector<Experts> nets;
        std::vector<torch::optim::AdamW> optimizers;
        for (int rank = 0; rank < ranks; ++rank) {
          nets.push_back(on_test_device(zero_net<Experts>(kFloatShards, strategy)));
          Experts other = zero_net<Experts>(kFloatShards, strategy, 100 + rank);
          torch::NoGradGuard no_grad;
          nets[rank]->expert->weight.copy_(other->expert->weight);
          optimizers.push_back(adam_of(nets[rank]));
        }
        Experts own = zero_net<Experts>(kFloatShards, strategy);
        {
          torch::NoGradGuard no_grad;
          own->expert->weight.copy_(nets[world.rank()]->expert->weight);
        }
        ShardedModelV2<Experts> model(own, strategy);
        auto adam = adam_of(own);
        ShardedOptimizerV2 optimizer(model, adam);
        for (int step = 0; step < 3; ++step) {
          for (auto& each : optimizers) each.zero_grad();
          step_experts(nets, step);
          for (auto& each : optimizers) each.step();
          optimizer.zero_grad();
          optimizer.backward(tower_loss(model, step, world.rank(), ranks));
          EXPECT_TRUE(optimizer.step());
        }
        expect_same_state(model.state_dict(), plain_state(*nets[world.rank()]), 1e-6, "experts");
        // The gate's gradient counts once, the experts' once each.
        for (auto& each : optimizers) each.zero_grad();
        step_experts(nets, 9);
        double squares = nets[0]->gate->weight.grad().square().sum().item<double>() +
                         nets[0]->gate->bias.grad().square().sum().item<double>();
        for (Experts& net : nets)
          for (const at::Tensor& param : net->expert->parameters())
            squares += param.grad().square().sum().item<double>();
        optimizer.zero_grad();
        optimizer.backward(tower_loss(model, 9, world.rank(), ranks));
        EXPECT_NEAR(optimizer.clip_grad_norm(model, 1e9), std::sqrt(squares),
                    1e-5 * std::sqrt(squares));
        expect_error([&] { optimizer.state_dict(); }, {"expert.weight", "each rank's own"});
        expect_error([&] { save_checkpoint(directory / "job", model.sharded(), nullptr); },
                     {"[checkpoint]", "expert.weight", "each rank's own"});
      });
    }
  }
}

TEST(ZeroInit, CO_03_AnUnusedExpertIsLeftAlone) {
  run_world(2, [](World& world) {
    Experts net = zero_net<Experts>(kFloatShards);
    ShardedModelV2<Experts> model(net, kTensor);
    auto adam = adam_of(net);
    ShardedOptimizerV2 optimizer(model, adam);
    const at::Tensor before = net->expert->weight.detach().clone();
    const at::Tensor x = tower_batch(0).x;
    at::Tensor y = world.rank() == 0 ? model.forward(x) : net->gate->forward(x);
    optimizer.backward(y.square().sum());
    EXPECT_TRUE(optimizer.step());
    EXPECT_EQ(torch::equal(net->expert->weight, before), world.rank() == 1);
  });
}

TEST(ZeroInit, CO_03_ParametersMayStayWhole) {
  for (const bool decorated : {false, true}) {
    run_world(2, [&](World& world) {
      const auto build = [&] {
        manual_seed(3);
        ZeroInitContext context(test_device(), kTensor, kFloatShards);
        torch::nn::Sequential net;
        net->push_back(torch::nn::Linear(6, 8));
        const auto make = [] { return torch::nn::Linear(8, 3); };
        if (decorated) {
          net->push_back(colossalai::no_shard_zero_decorator(make)());
        } else {
          const auto whole = no_shard_zero_context();
          net->push_back(make());
        }
        return net;
      };
      torch::nn::Sequential net = build();
      ShardedModelV2<torch::nn::Sequential> model(net, kTensor);
      const auto& units = model.sharded().state()->units();
      std::set<std::string> whole;
      for (const auto& unit : units)
        if (unit->layout().level == ShardLevel::kGradients) whole.insert(unit->layout().name);
      EXPECT_EQ(whole, (std::set<std::string>{"1.weight", "1.bias"}));
      EXPECT_TRUE(torch::equal(model.forward(tower_batch(0).x),
                               on_test_device(build())->forward(tower_batch(0).x)));
    });
  }
}

TEST(ZeroInit, CO_03_WithoutAContextAModelIsAnOrdinaryOne) {
  const auto make = [] {
    const auto own = no_shard_zero_context(/*is_replicated=*/false);
    return torch::nn::Linear(6, 8);
  };
  EXPECT_FALSE(is_deferred(make()->weight));
  EXPECT_TRUE(make()->weight.isfinite().all().item<bool>());
  // A ZeroInitContext inside is as any other.
  const auto outer = no_shard_zero_context();
  ShardedModelV2<Tower> model(zero_net<Tower>(kFloatShards), kTensor);
  EXPECT_EQ(model.sharded().state()->units()[0]->layout().level, ShardLevel::kParameters);
}

TEST(ZeroInit, CO_04_ASeedGivesTheValuesAndLeavesTheGenerator) {
  run_world(2, [](World& world) {
    manual_seed(50 + world.rank());
    const at::Tensor expected = torch::rand({3});
    manual_seed(50 + world.rank());
    const ZeroInitOptions options{.shard_param = true, .param_dtype = torch::kFloat, .seed = 3};
    Tower net = [&] {
      ZeroInitContext context(test_device(), kTensor, options);
      return Tower();
    }();
    EXPECT_TRUE(torch::equal(torch::rand({3}), expected));
    ShardedModelV2<Tower> model(net, kTensor);
    expect_same_state(model.state_dict(), plain_state(*eager_net<Tower>(3)), 0, "seeded");
  });
}

// A module of two parameters and nothing else.
std::shared_ptr<torch::nn::Module> zero_holder(int64_t rows, const ShardStrategyPtr& strategy) {
  manual_seed(3);
  ZeroInitContext context(test_device(), strategy, kFloatShards);
  auto holder = std::make_shared<torch::nn::Module>("holder");
  holder->register_parameter("even", torch::randn({rows, 3}));
  holder->register_parameter("tiny", torch::randn({1}));
  return holder;
}

// As in the original's test, [2 * n * ranks, 3] leaves 6 * n elements on each rank, where n makes
// them fill a cache line.
TEST(ZeroInit, CO_05_PartsAreEqualAndPadded) {
  for (const int ranks : {1, 2, 4}) {
    for (const auto& strategy : {kTensor, kBucket}) {
      run_world(ranks, [&](World& world) {
        const auto holder = zero_holder(32 * ranks, strategy);
        ShardedModelV2<torch::nn::Module> model(holder, strategy);
        const at::Tensor even = seeded(3, [&] { return torch::randn({32 * ranks, 3}); });
        const Unit& unit = *model.sharded().state()->units()[0];
        const at::Tensor part = unit.updated().narrow(0, 0, 96);
        if (strategy == kTensor) {
          EXPECT_EQ(unit.updated().numel(), 96);
          EXPECT_TRUE(torch::equal(part, even.flatten().narrow(0, 96 * world.rank(), 96)));
          const Unit& tiny = *model.sharded().state()->units()[1];
          EXPECT_EQ(tiny.layout().bounds[ranks], tiny.layout().shard_numel(0) * ranks);
        }
        EXPECT_TRUE(torch::equal(holder->named_parameters()["even"] + 0, even));
        EXPECT_EQ(holder->named_parameters()["tiny"].sizes(), (std::vector<int64_t>{1}));
      });
    }
  }
}

TEST(ZeroInit, CO_05_ABucketIsASubmodule) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto gathers = [&](const ShardStrategyPtr& strategy) {
      ShardedModelV2<NoLeaf> model(zero_net<NoLeaf>({.shard_param = true}, strategy), strategy);
      return std::pair(units_of(model.sharded()),
                       count(world, [&] { model.state_dict(); }).all_gather);
    };
    const auto [tensors, tensor_calls] = gathers(kTensor);
    const auto [buckets, bucket_calls] = gathers(kBucket);
    EXPECT_EQ(tensors, 5);
    EXPECT_EQ(buckets, 3);
    EXPECT_EQ(tensor_calls.calls, 5);
    EXPECT_EQ(bucket_calls.calls, 3);
  });
}

// Everything in one unit but the biases. Those stay whole.
struct OneUnit : colossalai::BaseShardStrategy {
  void apply(const torch::nn::Module& module, ShardPlan& plan) const override {
    plan.units.emplace_back();
    for (const auto& item : module.named_parameters()) {
      if (item.key().ends_with("bias")) {
        plan.whole.push_back(item.key());
      } else {
        plan.units[0].push_back(item.key());
      }
    }
  }
};

TEST(ZeroInit, CO_05_AStrategyMayBeTheUsersOwn) {
  run_world(2, [](World& world) {
    const auto own = std::make_shared<OneUnit>();
    Tower net = zero_net<Tower>(kFloatShards, own);
    ShardedModelV2<Tower> model(net, own);
    EXPECT_EQ(model.sharded().state()->find("first.weight")->unit,
              model.sharded().state()->find("last.weight")->unit);
    auto adam = adam_of(net);
    ShardedOptimizerV2 optimizer(model, adam);
    const auto trained = train_tower(model, optimizer, world);
    Tower plain = eager_net<Tower>();
    auto alone = adam_of(plain);
    expect_same_state(trained, train_tower_alone(*plain, alone, 2), 1e-6, "own strategy");
    expect_error([&] { ShardedModelV2<Tower>(zero_net<Tower>(), own); },
                 {"shard_strategy must be that of the ZeroInitContext"});
  });
}

}  // namespace tessera::testing::zero_init_test
