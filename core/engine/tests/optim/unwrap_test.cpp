// `ShardedModule::unwrap()` and `ShardedOptimizer::unwrap()`: a module and an optimizer as they
// were before they were sharded, with their trained values.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <torch/script.h>

#include "engine/optim/param_state.h"
#include "engine/optim/sharded_optimizer_access.h"
#include "engine/tests/optim/saved_optimizers.h"
#include "engine/unit/unit_storage.h"
#include "support/counted.h"

namespace tessera::testing::unwrap_test {

void expect_ordinary(torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& param = item.value();
    EXPECT_EQ(unit_of(param), nullptr) << item.key();
    EXPECT_FALSE(param.key_set().has(kUnitKey)) << item.key();
    EXPECT_EQ(param.storage().nbytes(), param.nbytes()) << item.key();
    EXPECT_TRUE(param.requires_grad()) << item.key();
    EXPECT_FALSE(param.grad().defined()) << item.key();  // and grad() can be called
  }
}

at::Tensor loss_of(Net& net, int64_t step, int rank, int size) {
  return rank_loss(net, global_batch(step, 12, kMlpWidth, kMlpOut), rank, size, step);
}

struct Case {
  std::string what;
  ShardPlan plan;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const ShardLevel level : kAllLevels) {
    const std::string name = "level " + std::to_string(static_cast<int>(level));
    cases.push_back({name, {.level = level, .unit_bytes = 300}});
    cases.push_back({name + ", bfloat16", {.level = level, .unit_bytes = 300}});
    cases.back().plan.precision.param_dtype = at::kBFloat16;
    cases.push_back(
        {name + ", offloaded", {.level = level, .unit_bytes = 300, .offload = Offload::kHost}});
    if (level == ShardLevel::kNone) continue;
    cases.push_back({name + ", whole", {.level = level, .partition = Partition::kWholeParam}});
    cases.push_back({name + ", rounded", {.level = level, .unit_bytes = 300}});
    cases.back().plan.precision.gather_dtype = at::kHalf;
  }
  return cases;
}

void run_everywhere(const std::function<void(World&)>& f) {
  for (const int ranks : {1, 2, 3})
    for (const Transport transport : kTransports) run_over(transport, ranks, f);
}

TEST(Unwrap, ParametersAreOrdinaryAndHaveTheFullValues) {
  run_everywhere([](World& world) {
    for (const Case& item : all_cases()) {
      const auto net = make_saved_mlp();
      auto sharded = fully_shard(net, item.plan);
      {
        torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(0.02));
        ShardedOptimizer optimizer(sharded, adamw);
        for (int step = 0; step < 2; ++step) {
          optimizer.zero_grad();
          loss_of(*net, step, world.rank(), world.size()).backward();
          optimizer.step();
        }
        loss_of(*net, 2, world.rank(), world.size()).backward();  // is forgotten
      }
      const auto expected = sharded.full_state();
      sharded.unwrap();
      expect_ordinary(*net);
      expect_same_state(plain_state(*net), expected, 0, item.what);
      loss_of(*net, world.rank(), 0, 1).backward();  // reduces nothing
      for (const at::Tensor& param : net->parameters()) EXPECT_TRUE(param.grad().defined());
    }
  });
}

TEST(Unwrap, AfterwardsNothingIsSent) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto net = make_saved_mlp();
    auto sharded = fully_shard(net, {.unit_bytes = 300});
    sharded.unwrap();
    const auto counts = count(world, [&] { loss_of(*net, 0, world.rank(), 2).backward(); });
    EXPECT_EQ(counts.calls(), 0);
  });
}

// Trains three steps sharded, unwraps, and continues on each rank alone, on all ranks' rows.
template <class MakeOptimizer>
void expect_to_go_on(const std::string& what, const MakeOptimizer& make) {
  for (const int ranks : {1, 2, 3}) {
    const auto plain = make_saved_mlp();
    const auto alone = make(*plain);
    const auto train = [&](Net& net, torch::optim::Optimizer& optimizer, int first, int last) {
      for (int step = first; step < last; ++step) {
        optimizer.zero_grad();
        for (int rank = 0; rank < ranks; ++rank)
          (loss_of(net, step, rank, ranks) / ranks).backward();
        optimizer.step();
      }
    };
    train(*plain, *alone, 0, 5);
    run_world(ranks, [&](World& world) {
      for (const Case& item : all_cases()) {
        if (item.what.find("bfloat16") != std::string::npos ||
            item.what.find("rounded") != std::string::npos)
          continue;  // they lose their masters
        const auto net = make_saved_mlp();
        const auto inner = make(*net);
        if (item.plan.offload != Offload::kNone && !knows_state(*inner)) continue;  // is refused
        auto sharded = fully_shard(net, item.plan);
        ShardedOptimizer optimizer(sharded, *inner, {.fused = false, .elementwise = true});
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          loss_of(*net, step, world.rank(), ranks).backward();
          optimizer.step();
        }
        optimizer.unwrap();
        sharded.unwrap();
        expect_ordinary(*net);
        ASSERT_EQ(inner->param_groups()[0].params().size(), net->parameters().size());
        train(*net, *inner, 3, 5);
        expect_same_state(plain_state(*net), plain_state(*plain), 2e-5, what + ", " + item.what);
      }
    });
  }
}

TEST(Unwrap, TheOptimizerGoesOnWithItsWholeState) {
  expect_to_go_on("AdamW", [](Net& net) {
    return std::make_unique<torch::optim::AdamW>(net.parameters(),
                                                 torch::optim::AdamWOptions(0.01).eps(1e-4));
  });
  expect_to_go_on("SGD", [](Net& net) {
    return std::make_unique<torch::optim::SGD>(net.parameters(),
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  });
  expect_to_go_on("HeavyBall", [](Net& net) {
    return std::make_unique<HeavyBall>(net.parameters(), HeavyBallOptions(0.05));
  });
}

TEST(Unwrap, TheModuleMayBeShardedAgain) {
  run_everywhere([](World& world) {
    const auto net = make_saved_mlp();
    SGD sgd(net->parameters(), SGDOptions(0.1).momentum(0.9));
    for (const ShardLevel level : kAllLevels) {
      auto sharded = fully_shard(net, {.level = level, .unit_bytes = 300});
      ShardedOptimizer optimizer(sharded, sgd, {.fused = false});
      optimizer.zero_grad();
      loss_of(*net, static_cast<int>(level), world.rank(), world.size()).backward();
      optimizer.step();
      optimizer.unwrap();
      sharded.unwrap();
    }
    const auto plain = make_saved_mlp();
    SGD alone(plain->parameters(), SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 4; ++step) {
      alone.zero_grad();
      for (int rank = 0; rank < world.size(); ++rank)
        (loss_of(*plain, step, rank, world.size()) / world.size()).backward();
      alone.step();
    }
    expect_same_state(plain_state(*net), plain_state(*plain), 1e-5, "four levels");
  });
}

TEST(Unwrap, IsRefusedWhereParametersAreInUseOtherwise) {
  run_world(2, [](World& world) {
    const auto net = make_saved_mlp();
    SGD sgd(net->parameters(), SGDOptions(0.1));
    auto sharded = fully_shard(net, {.level = ShardLevel::kGradients, .unit_bytes = 300});
    auto optimizer = std::make_unique<ShardedOptimizer>(sharded, sgd);
    expect_error([&] { sharded.unwrap(); }, {"[unwrap]", "ShardedOptimizer", "its unwrap() first"});
    {
      std::unique_ptr<ShardedModule::NoSync> guard;
      if (world.rank() == 1) guard.reset(new ShardedModule::NoSync(sharded.state()));
      expect_error([&] { sharded.unwrap(); }, {"[unwrap]", "no_sync()"});
    }
    {
      const auto guard = sharded.keep_unsharded();
      expect_error([&] { sharded.unwrap(); }, {"[unwrap]", "keep_unsharded()"});
    }
    join(sharded, {optimizer.get()}, [&] {
      expect_error([&] { sharded.unwrap(); }, {"[join]", "unwrap()"});
    });
    // Nothing has changed.
    loss_of(*net, 0, world.rank(), 2).backward();
    optimizer->step();
    optimizer->unwrap();
    expect_error([&] { optimizer->step(); }, {"[ShardedOptimizer]", "was unwrapped"});
    sharded.unwrap();
    expect_ordinary(*net);
  });
}

TEST(Unwrap, HandlesAreOfNoUseAfterIt) {
  run_world(2, [](World&) {
    const auto net = make_saved_mlp();
    auto sharded = fully_shard(net, {.sync_buffers = true});
    const ShardedModule copy = sharded;
    sharded.unwrap();
    const at::Tensor x = torch::ones({2, kMlpWidth}, test_device());
    const std::vector<std::function<void()>> calls = {
        [&] { sharded.forward(x); },         [&] { sharded.unwrap(); },
        [&] { sharded.full_state(); },       [&] { sharded.zero_grad(); },
        [&] { (void)sharded.no_sync(); },    [&] { (void)sharded.keep_unsharded(); },
        [&] { sharded.clip_grad_norm_(1); }, [&] { (void)copy.memory(); },
        [&] { (void)copy.describe(); },      [&] { save_checkpoint("/nowhere", copy, nullptr); }};
    for (const auto& call : calls) expect_error(call, {"was unwrapped"});
    net->forward(x);
  });
}

TEST(Unwrap, AGraphFromBeforeIsRight) {
  run_everywhere([](World& world) {
    for (const Case& item : all_cases()) {
      const auto net = make_saved_mlp(), plain = make_saved_mlp();
      auto sharded = fully_shard(net, item.plan);
      if (net->parameters()[0].scalar_type() != at::kFloat) continue;
      const at::Tensor loss = loss_of(*net, 0, world.rank(), world.size());
      sharded.unwrap();
      loss.backward();
      loss_of(*plain, 0, world.rank(), world.size()).backward();
      const auto expected = plain->named_parameters();
      const double tolerance = item.plan.precision.gather_dtype ? 2e-2 : 1e-5;
      for (const auto& named : net->named_parameters()) {
        EXPECT_TRUE(torch::allclose(named.value().grad(), expected[named.key()].grad(), tolerance,
                                    tolerance))
            << item.what << ", " << named.key();
      }
    }
  });
}

// It would silently step on tensors that nothing uses any more.
TEST(Unwrap, AnOptimizerThatWasLeftBehindSaysSo) {
  run_world(2, [](World& world) {
    const auto net = make_saved_mlp();
    SGD sgd(net->parameters(), SGDOptions(0.1));
    {
      auto sharded = fully_shard(net, {.unit_bytes = 300});
      { const ShardedOptimizer optimizer(sharded, sgd); }
      sharded.unwrap();
    }
    loss_of(*net, 0, world.rank(), 2).backward();
    expect_error([&] { sgd.step(); }, {"ShardedOptimizer::unwrap()"});
  });
}

TEST(Unwrap, OfAnOptimizerAloneIsRefusedWhereItsParametersAreCut) {
  run_world(2, [](World&) {
    const auto net = seeded(7, [] { return std::make_shared<Mlp>(); });
    torch::optim::SGD inner(net->parameters(), 0.1);
    auto sharded = fully_shard(net);
    ShardedOptimizer optimizer(sharded, inner);
    expect_error([&] { OptimizerAccess(optimizer).give_back(); },
                 {"only whole parameters can be given back", "is cut"});
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : first(register_parameter("first", torch::arange(12).to(at::kFloat).view({3, 4}))),
        again(register_parameter("again", first)),
        wide(register_parameter(
            "wide", torch::ones({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast))) {}
  at::Tensor first, again, wide;
};

TEST(Unwrap, TiesAndStridesStay) {
  run_everywhere([](World&) {
    const auto net = on_test_device(std::make_shared<TiedImpl>());
    const at::Tensor held = net->first;
    fully_shard(net).unwrap();
    EXPECT_TRUE(net->first.is_same(held));
    EXPECT_EQ(net->first.data_ptr(), net->again.data_ptr());
    EXPECT_TRUE(net->wide.is_contiguous(at::MemoryFormat::ChannelsLast));
    EXPECT_TRUE(same_values(held, torch::arange(12).view({3, 4}).to(at::kFloat)));
  });
}

TEST(Unwrap, WorksForScriptedModules) {
  run_world(2, [](World&) {
    torch::jit::Module module("scripted");
    module.register_parameter("weight", torch::ones({3, 4}, test_device()), /*is_buffer=*/false);
    module.define("def forward(self, x):\n    return x @ self.weight\n");
    ShardedModule sharded = fully_shard(module);
    sharded.unwrap();
    const at::Tensor weight = module.attr("weight").toTensor();
    EXPECT_EQ(unit_of(weight), nullptr);
    EXPECT_TRUE(same_values(weight, torch::ones({3, 4})));
    const at::Tensor x = torch::ones({1, 3}, test_device());
    EXPECT_EQ(module.forward({x}).toTensor()[0][0].item<float>(), 3);
  });
}

// A rank goes on from what it keeps unrounded, unless the user has written something else.
TEST(Unwrap, GivesConvertedParametersTheValuesThatWereNotRounded) {
  run_world(1, [](World&) {
    for (const double factor : {1.0, 2.0}) {
      torch::nn::Linear layer(5, 3);
      const at::Tensor made = layer->weight.detach().clone();
      auto sharded = fully_shard(layer, {.precision = {.gather_dtype = torch::kBFloat16}});
      const at::Tensor seen = layer->weight.detach().clone();
      EXPECT_FALSE(torch::equal(seen, made));
      layer->weight.set_data(seen.to(torch::kDouble) * factor);
      state_of(*layer)->give_back(GivenValues::kUpdated);
      EXPECT_TRUE(torch::equal(layer->weight, (factor == 1 ? made : seen * 2).to(torch::kDouble)));
    }
  });
}

}  // namespace tessera::testing::unwrap_test
