// ShardedModelV2.
#include <fmt/format.h>
#include <tessera/comm/process_group_decorators.h>

#include <filesystem>

#include "dialects/colossalai/tests/colossalai.h"
#include "engine/model/sharded_state.h"
#include "support/scratch_directory.h"

namespace tessera::testing::sharded_model_test {

// Trains `Net` sharded and in one process, from the same values.
template <class Net>
void expect_as_alone(World& world, const ShardStrategyPtr& strategy, const ZeroInitOptions& zero,
                     const ShardedModelV2Options& options, double tolerance, double max_norm = 0) {
  Net plain = eager_net<Net>();
  auto alone = adam_of(plain);
  const auto expected = train_tower_alone(*plain, alone, world.size(), 4, max_norm);
  Net net = zero_net<Net>(zero, strategy);
  ShardedModelV2<Net> model(net, strategy, options);
  auto adam = adam_of(net);
  ShardedOptimizerV2 optimizer(model, adam, kSmallScale);
  const auto trained = train_tower(model, optimizer, world, 4, max_norm);
  std::vector<NamedTensor> widened = trained;
  for (NamedTensor& item : widened)
    if (item.tensor.is_floating_point()) item.tensor = item.tensor.to(torch::kFloat);
  expect_same_state(widened, expected, tolerance, "training");
  expect_same_bits(world, trained);
}

template <class F>
void on_ranks_and_strategies(F&& f) {
  for (const int ranks : {1, 2, 3}) {
    for (const auto& strategy : {kTensor, kBucket}) {
      SCOPED_TRACE(fmt::format("{} ranks, {}", ranks, strategy == kTensor ? "tensor" : "bucket"));
      run_world(ranks, [&](World& world) { f(world, strategy); });
    }
  }
}

TEST(ShardedModelV2, CO_06_LayersMayRunSeveralTimes) {
  on_ranks_and_strategies([](World& world, const ShardStrategyPtr& strategy) {
    for (const bool shard_param : {true, false}) {
      const ZeroInitOptions zero{.shard_param = shard_param, .param_dtype = torch::kFloat};
      expect_as_alone<Twice>(world, strategy, zero, {}, 1e-5);
    }
  });
}

TEST(ShardedModelV2, CO_06_ModulesWithChildrenMayHaveParameters) {
  on_ranks_and_strategies([](World& world, const ShardStrategyPtr& strategy) {
    expect_as_alone<NoLeaf>(world, strategy, kFloatShards, {}, 1e-5);
  });
}

struct RecomputedImpl : TowerImpl {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y =
        checkpoint([this](const at::Tensor& in) { return torch::tanh(first(in)); }, x);
    return last(checkpoint([this](const at::Tensor& in) { return torch::tanh(second(in)); }, y)) +
           offset;
  }
};
TORCH_MODULE(Recomputed);

TEST(ShardedModelV2, CO_06_ActivationsMayBeRecomputed) {
  on_ranks_and_strategies([](World& world, const ShardStrategyPtr& strategy) {
    expect_as_alone<Recomputed>(world, strategy, kFloatShards, {}, 1e-5);
  });
}

TEST(ShardedModelV2, CO_06_HalfModelsTrainAsInOneProcess) {
  on_ranks_and_strategies([](World& world, const ShardStrategyPtr& strategy) {
    for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
      for (const bool shard_param : {true, false}) {
        const ZeroInitOptions zero{.shard_param = shard_param, .param_dtype = dtype};
        expect_as_alone<Tower>(world, strategy, zero, {}, dtype == torch::kHalf ? 1e-2 : 5e-2);
        expect_as_alone<Twice>(world, strategy, zero, {}, dtype == torch::kHalf ? 1e-2 : 5e-2);
      }
    }
  });
}

// Records the inputs, of several types, that reach a forward.
struct SeesImpl : torch::nn::Module {
  SeesImpl() : fc(register_module("fc", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const std::vector<at::Tensor>& list,
                     const std::map<std::string, std::tuple<at::Tensor, int>>& named,
                     const std::optional<at::Tensor>& maybe,
                     const std::pair<at::Tensor, at::Tensor>& pair, const at::Tensor& tokens,
                     const std::string& text) {
    dtypes = {list[0].scalar_type(),     std::get<0>(named.at("x")).scalar_type(),
              maybe->scalar_type(),      pair.first.scalar_type(),
              pair.second.scalar_type(), tokens.scalar_type()};
    number = std::get<1>(named.at("x"));
    this->text = text;
    return fc(list[0]);
  }
  torch::nn::Linear fc;
  std::vector<at::ScalarType> dtypes;
  int number = 0;
  std::string text;
};
TORCH_MODULE(Sees);

TEST(ShardedModelV2, CO_07_InputsAreConvertedAtAnyDepth) {
  run_world(2, [](World&) {
    ShardedModelV2<Sees> model(zero_net<Sees>(), kTensor);
    const at::Tensor x = on_test_device(torch::ones({3, 2}));
    const at::Tensor y =
        model.forward(std::vector<at::Tensor>{x},
                      std::map<std::string, std::tuple<at::Tensor, int>>{{"x", {x, 7}}},
                      std::optional<at::Tensor>(x), std::pair(x, x.to(torch::kLong)),
                      x.to(torch::kInt), std::string("as it is"));
    using torch::kHalf;
    EXPECT_EQ(model->dtypes,
              (std::vector<at::ScalarType>{kHalf, kHalf, kHalf, kHalf, torch::kLong, torch::kInt}));
    EXPECT_EQ(model->number, 7);
    EXPECT_EQ(model->text, "as it is");
    EXPECT_EQ(y.scalar_type(), kHalf);  // outputs stay as they are
    EXPECT_EQ(x.scalar_type(), torch::kFloat);
  });
}

TEST(ShardedModelV2, CO_08_BackwardGoesThroughTheModelOrTheOptimizer) {
  run_world(2, [](World& world) {
    const auto gradient = [&](const std::function<void(ShardedModelV2<Tower>&, ShardedOptimizerV2&,
                                                       const at::Tensor&)>& backward,
                              double divisor) {
      Tower net = zero_net<Tower>(kFloatShards);
      ShardedModelV2<Tower> model(net, kTensor);
      auto adam = adam_of(net);
      ShardedOptimizerV2 optimizer(model, adam, {.initial_scale = 1024});
      const Batch batch = tower_batch(0);
      backward(model, optimizer, model.forward(rows_of(batch.x, world.rank(), 2)));
      return model.sharded().full_grad("first.weight") / divisor;
    };
    const at::Tensor ones = on_test_device(torch::ones({6, 3}));
    const at::Tensor expected =
        gradient([](auto& model, auto&, const at::Tensor& y) { model.backward(y.sum()); }, 1);
    const auto check = [&](const at::Tensor& actual) {
      EXPECT_TRUE(torch::allclose(actual, expected, 1e-6));
    };
    check(gradient([](auto&, auto& optimizer, const at::Tensor& y) { optimizer.backward(y.sum()); },
                   1024));
    check(gradient(
        [&](auto& model, auto&, const at::Tensor& y) { model.backward_by_grad(y, ones); }, 1));
    check(gradient(
        [&](auto&, auto& optimizer, const at::Tensor& y) { optimizer.backward_by_grad(y, ones); },
        1024));
    // Both in one step would add scaled and unscaled gradients.
    expect_error(
        [&] {
          gradient(
              [](auto& model, auto& optimizer, const at::Tensor& y) {
                model.backward(y.sum());
                optimizer.backward(y.sum());
              },
              1);
        },
        {"all backwards of a step"});
  });
}

TEST(ShardedModelV2, CO_08_AStepWithoutScaleIsOne) {
  run_world(2, [](World& world) {
    const auto train = [&](bool scaled) {
      Tower net = zero_net<Tower>(kFloatShards);
      ShardedModelV2<Tower> model(net, kTensor);
      auto adam = adam_of(net);
      ShardedOptimizerV2 optimizer(model, adam, kSmallScale);
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        const at::Tensor loss = tower_loss(model, step, world.rank(), 2);
        scaled ? optimizer.backward(loss) : model.backward(loss);
        EXPECT_TRUE(optimizer.step());
      }
      return model.state_dict();
    };
    expect_same_state(train(false), train(true), 1e-6, "scaled or not");
  });
}

TEST(ShardedModelV2, CO_09_GradientsMayBeDividedBeforeTheyAreReduced) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_world(ranks, [&](World& world) {
      for (const auto factor : {std::optional<double>(), std::optional(2.0), std::optional(3.0)})
        expect_as_alone<Tower>(world, kTensor, kFloatShards, {.gradient_predivide_factor = factor},
                               1e-5);
    });
  }
  const auto automatic = [](int ranks) {
    double factor = 0;
    run_world(ranks, [&](World& world) {
      ShardedModelV2<Tower> model(zero_net<Tower>(), kTensor,
                                  {.gradient_predivide_factor = std::nullopt});
      if (world.rank() == 0) factor = model.sharded().state()->plan().predivide;
    });
    return factor;
  };
  EXPECT_EQ(automatic(1), 1);
  EXPECT_EQ(automatic(2), 2);
  EXPECT_EQ(automatic(3), 2);
  if (tests_on_host()) {
    EXPECT_EQ(automatic(8), 4);  // there need not be 8 devices
  }
}

// Counts a step's reductions of gradients. The world's process group must be a counting one.
CollectiveCounts::Entry reductions_of_a_step(World& world, const ShardedModelV2Options& options) {
  Tower net = zero_net<Tower>();
  ShardedModelV2<Tower> model(net, kTensor, options);
  auto adam = adam_of(net);
  ShardedOptimizerV2 optimizer(model, adam, kSmallScale);
  train_tower(model, optimizer, world, 2);
  return count(world, [&] { train_tower(model, optimizer, world, 1); }).reduce_scatter;
}

TEST(ShardedModelV2, CO_10_GradientsAreReducedInBuckets) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto reductions = [&](double mb) {
      return reductions_of_a_step(world, {.reduce_scatter_bucket_size_mb = mb}).calls;
    };
    EXPECT_EQ(reductions(25), 1);
    EXPECT_EQ(reductions(0), 6);
    EXPECT_EQ(reductions(-1), 6);
  });
}

TEST(ShardedModelV2, CO_11_GradientsMayTravelAsFloats) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto bytes = [&](bool wide) {
      return reductions_of_a_step(world, {.fp32_reduce_scatter = wide}).bytes_sent;
    };
    EXPECT_GT(bytes(false), 0);
    EXPECT_EQ(bytes(true), 2 * bytes(false));
  });
}

TEST(ShardedModelV2, CO_12_GradientsAddUpInFloats) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      for (const auto dtype : {torch::kHalf, torch::kFloat}) {
        Tower net = zero_net<Tower>({.shard_param = true, .param_dtype = dtype});
        ShardedModelV2<Tower> model(net, kTensor);
        at::Tensor sum = torch::zeros_like(eager_net<Tower>()->second->weight);
        for (int i = 0; i < 3; ++i) {
          model.backward(tower_loss(model, i, world.rank(), ranks));
          const at::Tensor so_far = model.sharded().full_grad("second.weight");
          EXPECT_EQ(so_far.scalar_type(), torch::kFloat);
          Tower one = zero_net<Tower>({.shard_param = true, .param_dtype = dtype});
          ShardedModelV2<Tower> single(one, kTensor);
          single.backward(tower_loss(single, i, world.rank(), ranks));
          sum = sum + single.sharded().full_grad("second.weight");
          EXPECT_TRUE(torch::allclose(so_far, sum, 1e-6, 1e-7)) << i;
        }
      }
    });
  }
}

TEST(ShardedModelV2, CO_13_TheShardMayBeTheMastersAlone) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      const auto train = [&](bool reuse, int64_t& bytes) {
        Tower net = zero_net<Tower>();
        ShardedModelV2<Tower> model(net, kTensor, {.reuse_fp16_shard = reuse});
        auto adam = adam_of(net);
        ShardedOptimizerV2 optimizer(model, adam, kSmallScale);
        bytes = model.sharded().memory().parameters;
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          // A second backward is no error here.
          for (int part = 0; part < 2; ++part)
            optimizer.backward(tower_loss(model, 2 * step + part, world.rank(), ranks));
          EXPECT_TRUE(optimizer.step());
        }
        return model.state_dict();
      };
      int64_t bytes = 0, reused = 0;
      const auto expected = train(false, bytes);
      expect_same_state(train(true, reused), expected, 0, "reused");
      if (ranks > 1) {
        EXPECT_EQ(reused, 0);
      }
      EXPECT_GT(bytes, 0);
    });
  }
}

TEST(ShardedModelV2, CO_14_OptimizerStateMayBeOffloaded) {
  run_world(2, [](World& world) {
    for (const ShardedModelV2Options& options :
         {ShardedModelV2Options{.offload_config = {{"device", "cpu"}}},
          ShardedModelV2Options{.tensor_placement_policy = "cpu"}}) {
      ShardedModelV2<Tower> model(zero_net<Tower>(), kTensor, options);
      EXPECT_GT(model.sharded().memory().offloaded, 0);
      expect_as_alone<Tower>(world, kBucket, kFloatShards, options, 1e-5);
    }
    for (const auto& config : std::vector<std::map<std::string, std::string>>{
             {{"device", "nvme"}}, {{"path", "x"}}, {{"device", "cpu"}, {"pin", "1"}}})
      expect_error(
          [&] { ShardedModelV2<Tower>(zero_net<Tower>(), kTensor, {.offload_config = config}); },
          {"offload_config must be"});
    expect_error(
        [&] {
          ShardedModelV2<Tower>(zero_net<Tower>(), kTensor, {.tensor_placement_policy = "gpu"});
        },
        {"Unknown tensor placement policy gpu"});
  });
}

TEST(ShardedModelV2, CO_15_GradientsThatNeedGradientsAreRefused) {
  run_world(2, [](World& world) {
    ShardedModelV2<Tower> model(zero_net<Tower>(kFloatShards), kTensor);
    const at::Tensor loss = tower_loss(model, 0, world.rank(), 2);
    expect_error([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
                 {"requires a gradient itself"});
  });
}

TEST(ShardedModelV2, CO_16_MemoryIsTracedAndWritten) {
  const ScratchDirectory directory;
  run_world(2, [&](World& world) {
    Tower net = zero_net<Tower>();
    ShardedModelV2<Tower> model(net, kTensor, {.use_memory_tracer = true});
    auto adam = adam_of(net);
    ShardedOptimizerV2 optimizer(model, adam, kSmallScale);
    train_tower(model, optimizer, world, 2);
    const std::string path = directory / "stats";
    model.dump_memory_stats(path);
    if (world.rank() == 0) {
      for (const std::string& file : {path, path + ".svg", path + ".json"})
        EXPECT_GT(std::filesystem::file_size(file), 100U) << file;
    }
    ShardedModelV2<Tower> untraced(zero_net<Tower>(), kTensor);
    expect_error([&] { untraced.dump_memory_stats(path); }, {"needs use_memory_tracer"});
  });
}

TEST(ShardedModelV2, CO_16_TheBudgetIsFilledWithWhatIsUsedNext) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto gathers = [&](const ShardedModelV2Options& options) {
      Tower net = zero_net<Tower>();
      ShardedModelV2<Tower> model(net, kTensor, options);
      auto adam = adam_of(net);
      ShardedOptimizerV2 optimizer(model, adam, kSmallScale);
      train_tower(model, optimizer, world, 3);
      const auto step = [&] {
        optimizer.zero_grad();
        optimizer.backward(tower_loss(model, 0, world.rank(), 2));
        EXPECT_TRUE(optimizer.step());
      };
      step();
      return count(world, step).all_gather.calls;
    };
    const auto with = [](int64_t bytes) {
      return ShardedModelV2Options{.tensor_placement_policy = "auto", .memory_budget = bytes};
    };
    const auto freed = gathers({});
    EXPECT_EQ(gathers(with(1 << 30)), 6) << "each parameter once";
    EXPECT_GT(freed, 6);
    expect_error([&] { gathers(with(100)); }, {"100"});
    expect_error([&] { gathers({.tensor_placement_policy = "auto"}); }, {"needs memory_budget"});
  });
}

TEST(ShardedModelV2, CO_17_StateIsThatOfThePlainModel) {
  on_ranks_and_strategies([](World& world, const ShardStrategyPtr& strategy) {
    for (const bool shard_param : {true, false}) {
      Tower net = zero_net<Tower>({.shard_param = shard_param}, strategy);
      ShardedModelV2<Tower> model(net, strategy);
      Tower plain = eager_net<Tower>();
      plain->to(torch::kHalf);
      plain->calls.set_data(plain->calls.to(torch::kLong));
      expect_same_state(model.state_dict(), plain_state(*plain), 0, "state_dict");
      // Loading replaces all values, and keeps digits that half can't hold for the optimizer.
      Tower other = eager_net<Tower>(8);
      model.load_state_dict(plain_state(*other));
      const at::Tensor master = model.sharded().state()->units()[0]->updated();
      other->to(torch::kHalf);
      other->calls.set_data(other->calls.to(torch::kLong));
      expect_same_state(model.state_dict(), plain_state(*other), 0, "loaded");
      EXPECT_EQ(master.scalar_type(), torch::kFloat);
      if (world.rank() == 0) {
        EXPECT_FALSE(torch::equal(master, master.to(torch::kHalf).to(torch::kFloat)));
      }
      auto part = plain_state(*other);
      part.erase(part.begin());
      expect_error([&] { model.load_state_dict(part); }, {"'first.weight' is missing"});
      part.push_back({"unknown", torch::ones({1})});
      model.load_state_dict(part, /*strict=*/false);
      expect_same_state(model.state_dict(), plain_state(*other), 0, "not strict");
      part[0].tensor = torch::ones({2});
      expect_error([&] { model.load_state_dict(part, false); }, {"must have the shape"});
    }
  });
}

TEST(ShardedModelV2, CO_17_ModuleListsAreLists) {
  run_world(2, [](World&) {
    const auto list = [] {
      ZeroInitContext context(test_device(), kTensor, kFloatShards);
      return torch::nn::ModuleList(torch::nn::Linear(4, 5), torch::nn::Linear(5, 6));
    }();
    ShardedModelV2<torch::nn::ModuleList> model(list, kTensor);
    EXPECT_EQ(model.size(), 2U);
    at::Tensor x = on_test_device(torch::ones({2, 4}));
    for (const auto& module : model) x = module->as<torch::nn::Linear>()->forward(x);
    EXPECT_EQ(x.sizes(), (std::vector<int64_t>{2, 6}));
    EXPECT_EQ(model[1]->as<torch::nn::Linear>()->weight.sizes(), (std::vector<int64_t>{6, 5}));
  });
}

TEST(ShardedModelV2, CO_18_UnshardedParametersHaveShardedState) {
  run_world(2, [](World& world) {
    const auto bytes_of = [&](bool shard_param) {
      Tower net = zero_net<Tower>({.shard_param = shard_param});
      ShardedModelV2<Tower> model(net, kTensor);
      auto adam = adam_of(net);
      ShardedOptimizerV2 optimizer(model, adam, kSmallScale);
      train_tower(model, optimizer, world, 1);
      return optimizer.sharded().memory();
    };
    const ShardMemory whole = bytes_of(false), sharded = bytes_of(true);
    EXPECT_EQ(whole.parameters, 2 * sharded.parameters);
    EXPECT_EQ(whole.master_weights, sharded.master_weights);
    EXPECT_EQ(whole.optimizer_state, sharded.optimizer_state);
    EXPECT_EQ(whole.gradients, sharded.gradients);
  });
}

TEST(ShardedModelV2, OptionsMustFit) {
  run_world(2, [](World& world) {
    const auto make = [](const ShardedModelV2Options& options) {
      ShardedModelV2<Tower>(zero_net<Tower>(), kTensor, options);
    };
    expect_error([&] { make({.reduce_scatter_process_group = single_process_group()}); },
                 {"reduce_scatter_process_group must be null"});
    expect_error([&] { make({.memory_budget = 5}); }, {"memory_budget needs"});
    expect_error(
        [&] {
          make({.offload_config = {{"device", "cpu"}},
                .tensor_placement_policy = "auto",
                .memory_budget = 5});
        },
        {"offload_config can't go with"});
    expect_error([&] { make({.gradient_predivide_factor = 0}); }, {"predivide"});
    expect_error([&] { ShardedModelV2<Tower>(zero_net<Tower>(), nullptr); }, {"shard_strategy"});
    ShardedModelV2<Tower> model(zero_net<Tower>(), kTensor,
                                {.process_group = world.process_group()});
  });
}

}  // namespace tessera::testing::sharded_model_test
