// User code's access to the parameters of a sharded model.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/model/sharded_state.h"
#include "support/models.h"

namespace tessera::testing::access_test {

std::shared_ptr<Mlp> make_mlp() {
  return seeded(7, [] { return std::make_shared<Mlp>(37, 3, 5); });
}

// Runs `f` with the sharded and the plain model, on worlds of several sizes and at several levels.
void on_sharded(const std::function<void(World&, Sharded<Mlp>&, Mlp&)>& f,
                const std::vector<int>& sizes = {1, 2, 3},
                const std::vector<ShardPlan>& plans = at_each_level({.unit_bytes = 6000})) {
  on_worlds(sizes, plans, [&](World& world, const ShardPlan& plan) {
    const auto plain = make_mlp();
    auto sharded = fully_shard(make_mlp(), plan);
    f(world, sharded, *plain);
  });
}

const std::vector<int> kManyRanks = {2, 3};
const std::vector<ShardPlan> kParametersOnly = {{.unit_bytes = 6000}};

const Unit& unit(const ShardedModule& sharded, size_t i) { return *sharded.state()->units()[i]; }

at::Generator generator_of_device(uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(test_device()).clone();
  generator.set_current_seed(seed);
  return generator;
}

// A tensor over the memory that user code finds by its address.
torch::Tensor raw_memory(const torch::Tensor& tensor) {
  return torch::from_blob(tensor.data_ptr<float>(), tensor.sizes(), tensor.options());
}

TEST(Access, ParametersAreGatheredOnFirstUseAndFreedAfterIt) {
  on_sharded(
      [](World&, Sharded<Mlp>& sharded, Mlp& plain) {
        const size_t units = sharded.state()->units().size();
        ASSERT_EQ(units, 4U);
        for (size_t i = 0; i < units; ++i)
          EXPECT_EQ(unit(sharded, i).state(), Unit::State::kSharded);
        const auto x = on_test_device(torch::ones({2, 37}));
        EXPECT_TRUE(torch::equal(sharded->fcs[0]->forward(x), plain.fcs[0]->forward(x)));
        EXPECT_EQ(unit(sharded, 0).state(), Unit::State::kUnsharded);
        EXPECT_EQ(unit(sharded, units - 1).state(), Unit::State::kSharded);
        EXPECT_TRUE(torch::equal(sharded.forward(x), plain.forward(x)));
        EXPECT_EQ(unit(sharded, 0).state(), Unit::State::kSharded);
        sharded.forward(x).sum().backward();
        for (size_t i = 0; i < units; ++i)
          EXPECT_EQ(unit(sharded, i).state(), Unit::State::kSharded);
      },
      kManyRanks, kParametersOnly);
}

TEST(Access, AVisitOfAllUnitsHoldsOneAtATime) {
  on_sharded(
      [](World&, Sharded<Mlp>& sharded, Mlp&) {
        size_t visited = 0;
        sharded.state()->visit_whole_units([&](const Unit& whole) {
          const size_t units = sharded.state()->units().size();
          for (size_t i = 0; i < units; ++i)
            EXPECT_EQ(unit(sharded, i).state() == Unit::State::kUnsharded, i == visited);
          EXPECT_EQ(&whole, &unit(sharded, visited++));
        });
        EXPECT_EQ(visited, sharded.state()->units().size());
        EXPECT_EQ(unit(sharded, visited - 1).state(), Unit::State::kSharded);
      },
      kManyRanks, kParametersOnly);
}

TEST(Access, ViewsTakenBeforeTheGatherSeeTheValues) {
  on_sharded([](World&, Sharded<Mlp>& sharded, Mlp& plain) {
    const auto view = sharded->fcs[1]->weight.t().narrow(0, 3, 7).select(1, 2);
    const auto later = sharded->head->weight.detach().view({-1});
    const auto expected = plain.fcs[1]->weight.t().narrow(0, 3, 7).select(1, 2);
    EXPECT_TRUE(torch::equal(view * 1, expected * 1));
    EXPECT_TRUE(torch::equal(later + 0, plain.head->weight.view({-1}) + 0));
  });
}

TEST(Access, CopiesOfAShardedParameterAreWhole) {
  on_sharded([](World&, Sharded<Mlp>& sharded, Mlp& plain) {
    const auto& w = sharded->fcs[0]->weight;
    const auto& p = plain.fcs[0]->weight;
    const std::vector<std::function<torch::Tensor(const torch::Tensor&)>> copies = {
        [](const auto& t) { return t.clone(); },
        [](const auto& t) { return t.t().contiguous(); },
        [](const auto& t) { return t.t().reshape({-1}); },
        [](const auto& t) { return t.reshape({-1}).clone(); },
        [](const auto& t) { return t.to(torch::kDouble); },
        [](const auto& t) { return t.flatten().index({torch::indexing::Slice(3, 9)}).clone(); },
        [](const auto& t) {
          return t.index({on_test_device(torch::tensor({1, 3}))});
        },
        [](const auto& t) { return torch::stack(t.unbind(0)); },
        [](const auto& t) { return torch::cat(t.chunk(3, 0)); },
        [](const auto& t) { return t.contiguous() * 1; },
        [](const auto& t) { return t.to(torch::kFloat) * 1; },
        [](const auto& t) { return torch::zeros_like(t) + torch::empty_like(t).fill_(1); },
    };
    for (size_t i = 0; i < copies.size(); ++i) {
      sharded.state()->residency().free_everything();
      EXPECT_TRUE(torch::equal(copies[i](w), copies[i](p))) << "copy " << i;
    }
  });
}

TEST(Access, OneOperatorMayUseAllUnitsAtOnce) {
  on_sharded([](World&, Sharded<Mlp>& sharded, Mlp& plain) {
    const auto flat = [](Mlp& net) {
      std::vector<torch::Tensor> all;
      for (const auto& param : net.parameters()) all.push_back(param.flatten());
      return torch::cat(all);
    };
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(torch::equal(flat(*sharded), flat(plain)));
      const auto norms = torch::_foreach_norm(sharded->parameters(), 2);
      const auto expected = torch::_foreach_norm(plain.parameters(), 2);
      EXPECT_TRUE(torch::equal(torch::stack(norms), torch::stack(expected)));
      const auto loss = flat(*sharded).square().sum();
      loss.backward();
      const auto loss_alone = flat(plain).square().sum();
      plain.zero_grad();
      loss_alone.backward();
      EXPECT_TRUE(torch::allclose(sharded.full_grad("fc1.weight"), plain.fcs[1]->weight.grad()));
      sharded.zero_grad();
    }
  });
}

TEST(Access, ValuesCanBeReadAsNumbers) {
  on_sharded([](World&, Sharded<Mlp>& sharded, Mlp& plain) {
    EXPECT_EQ(sharded->fcs[2]->bias[3].item<float>(), plain.fcs[2]->bias[3].item<float>());
    EXPECT_TRUE(sharded->head->weight.equal(plain.head->weight));
    EXPECT_EQ(sharded->head->weight.sum().item<float>(), plain.head->weight.sum().item<float>());
  });
}

TEST(Access, WritesByOperatorsReachAllRanks) {
  on_sharded([](World& world, Sharded<Mlp>& sharded, Mlp& plain) {
    for (Mlp* net : {&*sharded, &plain}) {
      torch::NoGradGuard no_grad;
      net->fcs[0]->weight.normal_(0, 0.3, generator_of_device(11));
      torch::nn::init::zeros_(net->fcs[1]->bias);
      net->fcs[1]->weight.mul_(2);
      net->fcs[2]->weight.narrow(0, 2, 3).fill_(0.25);
      net->fcs[2]->weight.t().add_(0.5);
      net->norm->weight.copy_(on_test_device(torch::linspace(0, 1, 37)));
      torch::_foreach_mul_(std::vector<torch::Tensor>{net->head->weight, net->fcs[0]->bias}, 3);
      torch::add_out(net->head->bias, net->head->bias.clone(), on_test_device(torch::ones({5})));
    }
    expect_same_state(sharded.full_state(), plain_state(plain), 0, "after writes");
    EXPECT_TRUE(torch::equal(sharded->fcs[1]->weight * 1, plain.fcs[1]->weight * 1));
  });
}

TEST(Access, RanksThatWriteDifferentValuesEndWithOneReplica) {
  const auto train = [](World& world) {
    std::vector<State> states;
    for (const ShardPlan& plan : at_each_level({.unit_bytes = 6000})) {
      auto sharded = fully_shard(make_mlp(), plan);
      torch::NoGradGuard no_grad;
      sharded->fcs[0]->weight.fill_(static_cast<double>(world.rank()));
      torch::nn::init::normal_(sharded->fcs[1]->weight);  // the ranks draw different values
      states.push_back(sharded.full_state());
      EXPECT_TRUE(torch::equal(sharded->fcs[0]->weight * 1, states.back()[0].tensor));
    }
    return states;
  };
  const auto states = results_of(3, train);
  for (const auto& of_rank : states) {
    for (size_t i = 0; i < of_rank.size(); ++i)
      expect_same_state(of_rank[i], states[0][i], 0, "replicas");
  }
}

TEST(Access, RawMemoryOfAShardedParameterIsRefusedWithItsNameAndAHint) {
  on_sharded(
      [](World&, Sharded<Mlp>& sharded, Mlp& plain) {
        expect_error([&] { sharded->fcs[1]->weight.data_ptr<float>(); },
                     {"fc1.weight", "keep_unsharded"});
        expect_error([&] { sharded->head->weight.const_data_ptr(); }, {"head", "keep_unsharded"});
        expect_error([&] { sharded->fcs[1]->weight.accessor<float, 2>(); }, {"keep_unsharded"});
        const auto guard = sharded.keep_unsharded();
        EXPECT_TRUE(same_values(raw_memory(sharded->fcs[1]->weight), plain.fcs[1]->weight));
      },
      kManyRanks, kParametersOnly);
}

// Reads each parameter past the operators, in each way that LibTorch has: finds the values that
// operators find, or is refused with the parameter's name and the call to use.
void expect_values_or_refusals(Sharded<Mlp>& sharded, const std::string& when) {
  using Pointer = const void*;
  const std::vector<std::function<Pointer(const torch::Tensor&)>> ways = {
      [](const torch::Tensor& tensor) -> Pointer { return tensor.data_ptr(); },
      [](const torch::Tensor& tensor) -> Pointer { return tensor.const_data_ptr(); },
      [](const torch::Tensor& tensor) -> Pointer { return tensor.data_ptr<float>(); },
      [](const torch::Tensor& tensor) -> Pointer { return tensor.const_data_ptr<float>(); },
      [](const torch::Tensor& tensor) -> Pointer {
        return tensor.dim() == 1 ? tensor.accessor<float, 1>().data()
                                 : tensor.accessor<float, 2>().data();
      }};
  std::vector<std::pair<torch::Tensor, torch::Tensor>> read;  // a parameter, and what was found
  for (const auto& param : sharded->named_parameters()) {
    for (size_t i = 0; i < ways.size(); ++i) {
      SCOPED_TRACE(fmt::format("{}, {}, way {}", when, param.key(), i));
      try {
        auto* const data = const_cast<void*>(ways[i](param.value()));
        EXPECT_NE(data, nullptr);
        if (!data) continue;
        const auto found = torch::from_blob(data, param->sizes(), param->options()).clone();
        read.emplace_back(param.value(), found);
      } catch (const c10::Error& error) {
        expect_error([&] { throw error; }, {"'" + param.key() + "'", "keep_unsharded"});
      }
    }
  }
  for (const auto& [param, found] : read)  // an operator gathers: not before everything was read
    EXPECT_TRUE(same_values(found, param.detach().clone())) << when;
}

TEST(Access, RawMemoryHasTheValuesOrIsRefusedAtEveryMomentOfAStep) {
  const auto train = [](World& world) {
    for (const ShardLevel level : kAllLevels) {
      auto sharded = fully_shard(make_mlp(), {.level = level, .unit_bytes = 6000});
      torch::optim::SGD inner(sharded->parameters(), 0.1);
      ShardedOptimizer optimizer(sharded, inner);
      const auto expect_safe = [&](const char* when) {
        expect_values_or_refusals(sharded,
                                  fmt::format("level {} {}", static_cast<int>(level), when));
      };
      expect_safe("sharded");
      const Batch batch = global_batch(0, 12, 37, 5);
      const auto loss = rank_loss(*sharded, batch, world.rank(), world.size(), 0);
      expect_safe("forward");
      loss.backward();
      expect_safe("backward");
      optimizer.step();
      expect_safe("step");
      torch::NoGradGuard no_grad;
      sharded->fcs[1]->weight.mul_(2);
      expect_safe("write");
    }
  };
  run_world(2, train);
  run_arena(2, train);
  run_hosts(4, by_halves, train);
}

TEST(Access, KeptUnshardedAllParametersCanBeReadRawAlsoAfterAStep) {
  on_sharded([](World& world, Sharded<Mlp>& sharded, Mlp&) {
    torch::optim::SGD inner(sharded->parameters(), 0.1);
    ShardedOptimizer optimizer(sharded, inner);
    const auto guard = sharded.keep_unsharded();
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      rank_loss(*sharded, global_batch(step, 12, 37, 5), world.rank(), world.size(), step)
          .backward();
      optimizer.step();
      const auto state = sharded.full_state();
      for (const auto& item : sharded->named_parameters()) {
        const auto found = std::find_if(state.begin(), state.end(), [&](const NamedTensor& named) {
          return named.name == item.key();
        });
        item.value().sum().item<float>();  // the gather after the step may still run
        EXPECT_TRUE(same_values(raw_memory(item.value()), found->tensor)) << item.key();
      }
    }
  });
}

TEST(Access, GradReadsAreRefusedWithTheNameAndFullGrad) {
  on_sharded([](World&, Sharded<Mlp>& sharded, Mlp&) {
    expect_error([&] { (void)sharded->fcs[0]->bias.grad(); }, {"fc0.bias", "full_grad"});
    sharded.forward(on_test_device(torch::ones({2, 37}))).sum().backward();
    expect_error([&] { (void)sharded->fcs[0]->bias.grad(); },
                 {"fc0.bias", "full_grad", "clip_grad_norm_"});
    EXPECT_THROW(torch::nn::utils::clip_grad_norm_(sharded->parameters(), 1.0), c10::Error);
  });
}

TEST(Access, TheModuleWorksOnAfterItsHandleIsGone) {
  on_sharded([](World&, Sharded<Mlp>& sharded, Mlp& plain) {
    const auto module = make_mlp();
    { const auto handle = fully_shard(module, sharded.state()->plan()); }
    const auto x = on_test_device(torch::ones({2, 37}));
    EXPECT_TRUE(torch::equal(module->forward(x), plain.forward(x)));
    module->forward(x).sum().backward();
  });
}

TEST(Access, NothingIsKeptOnceModuleAndHandleAreGone) {
  on_sharded([](World& world, Sharded<Mlp>& sharded, Mlp&) {
    std::weak_ptr<ShardedState> state;
    {
      const auto other = fully_shard(make_mlp(), sharded.state()->plan());
      torch::optim::SGD inner(other->parameters(), 0.1);
      ShardedOptimizer optimizer(other, inner);
      rank_loss(*other, global_batch(0, 12, 37, 5), world.rank(), world.size(), 0).backward();
      optimizer.step();
      state = other.state();
    }
    EXPECT_TRUE(state.expired());
  });
}

TEST(Access, GraphsOutliveTheModule) {
  on_sharded([](World&, Sharded<Mlp>& sharded, Mlp&) {
    auto x = on_test_device(torch::ones({2, 37})).requires_grad_();
    torch::Tensor loss;
    {
      auto other = fully_shard(make_mlp(), sharded.state()->plan());
      loss = other.forward(x).sum();
    }
    loss.backward();
    EXPECT_GT(x.grad().abs().sum().item<float>(), 0);
  });
}

TEST(Access, ConvertingTheModuleAfterShardingIsNoticedAtTheStep) {
  on_sharded([](World& world, Sharded<Mlp>& sharded, Mlp&) {
    torch::optim::SGD inner(sharded->parameters(), 0.1);
    ShardedOptimizer optimizer(sharded, inner);
    const auto batch = global_batch(0, 12, 37, 5);
    rank_loss(*sharded, batch, world.rank(), world.size(), 0).backward();
    sharded->to(torch::kDouble);
    expect_error([&] { optimizer.step(); }, {"fc0.weight", "before sharding"});
  });
}

}  // namespace tessera::testing::access_test
