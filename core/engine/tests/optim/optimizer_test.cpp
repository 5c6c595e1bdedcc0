// Every elementwise optimizer on shards, plain and fused, against one process; and refused uses.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine/model/sharded_state.h"
#include "engine/optim/param_state.h"
#include "support/sharded_job.h"

namespace tessera::testing::optimizer_test {

using namespace torch::optim;

constexpr int kRanks[] = {1, 2, 3, 4};

TrainingRun mlp_run() { return sgd_run<Mlp>(37, 2, 5); }
std::shared_ptr<Mlp> make_mlp() { return std::static_pointer_cast<Mlp>(mlp_run().make_net()); }

struct NamedRun {
  std::string name;
  bool has_fused;
  std::function<std::unique_ptr<Optimizer>(std::vector<torch::Tensor>)> make;
};

template <class O, class Options>
NamedRun named(std::string name, bool has_fused, Options options) {
  return {std::move(name), has_fused,
          [=](std::vector<torch::Tensor> params) -> std::unique_ptr<Optimizer> {
            return std::make_unique<O>(std::move(params), options);
          }};
}

std::vector<NamedRun> all_optimizers() {
  return {
      named<SGD>("SGD", true, SGDOptions(0.1)),
      named<SGD>("SGD with Nesterov", true,
                 SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1)),
      named<SGD>("SGD with dampening", true, SGDOptions(0.1).momentum(0.9).dampening(0.2)),
      named<Adam>("Adam", true, AdamOptions(1e-2).weight_decay(0.1)),
      named<Adam>("Adam with AMSGrad", true, AdamOptions(1e-2).amsgrad(true)),
      named<AdamW>("AdamW", true, AdamWOptions(1e-2).weight_decay(0.1)),
      named<AdamW>("AdamW with AMSGrad", true, AdamWOptions(1e-2).amsgrad(true)),
      named<CPUAdam>("CPUAdam", true, CPUAdamOptions(1e-2).weight_decay(0.1)),
      named<Adagrad>("Adagrad", true,
                     AdagradOptions(1e-2).lr_decay(0.1).initial_accumulator_value(0.3)),
      named<RMSprop>("RMSprop", false,
                     RMSpropOptions(1e-3).momentum(0.5).centered(true).weight_decay(0.1)),
  };
}

TEST(Optimizers, PlainAndFusedStepsOnShardsGiveTheResultOfOneProcess) {
  const std::vector<ShardPlan> plans = {
      {.level = ShardLevel::kGradients, .partition = Partition::kWholeParam, .unit_bytes = 6000},
      {.level = ShardLevel::kParameters, .partition = Partition::kFlatEven, .unit_bytes = 6000}};
  for (const NamedRun& optimizer : all_optimizers()) {
    TrainingRun run = mlp_run();
    run.make_optimizer = [&](Net& net) { return optimizer.make(net.parameters()); };
    run.steps = 3;
    for (const int ranks : kRanks) {
      std::vector<ParityCase> cases;
      for (const ShardPlan& plan : plans) {
        for (const bool fused : {false, true}) {
          // Adam divides by the root of a mean: tiny gradients turn rounding into whole steps.
          const double tolerance = !fused && ranks != 3 ? 0 : ranks == 3 ? 1e-4 : 2e-5;
          cases.push_back({plan, optimizer.name, {.fused = fused}, tolerance});
        }
      }
      expect_parity_of_each(run, ranks, cases);
    }
  }
}

TEST(Optimizers, ParamGroupsKeepTheirOptionsAndSchedulersWork) {
  TrainingRun run = mlp_run();
  run.make_optimizer = [](Net& net) {
    std::vector<torch::Tensor> decay, rest;
    for (const auto& param : net.parameters()) (param.dim() > 1 ? decay : rest).push_back(param);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(decay,
                        std::make_unique<AdamWOptions>(AdamWOptions(1e-2).weight_decay(0.3)));
    groups.emplace_back(rest, std::make_unique<AdamWOptions>(AdamWOptions(3e-2).weight_decay(0)));
    return std::make_unique<AdamW>(groups, AdamWOptions(1e-3));
  };
  const auto alone = make_mlp();
  const auto plain = run.make_optimizer(*alone);
  StepLR plain_scheduler(*plain, 2, 0.5);
  for (int step = 0; step < 5; ++step) {
    plain->zero_grad();
    rank_loss(*alone, global_batch(step, 12, 37, 5), 0, 1, step).backward();
    plain->step();
    plain_scheduler.step();
  }
  for (const int ranks : kRanks) {
    for (const bool fused : {false, true}) {
      run_world(ranks, [&](World& world) {
        ShardedJob job(run, world, {}, {.fused = fused});
        StepLR scheduler(*job.inner, 2, 0.5);
        for (int step = 0; step < 5; ++step) job.step(step), scheduler.step();
        EXPECT_DOUBLE_EQ(job.inner->param_groups()[1].options().get_lr(), 3e-2 * 0.25);
        expect_same_state(job.state(), plain_state(*alone), 1e-4, fmt::format("{} ranks", ranks));
      });
    }
  }
}

TEST(Optimizers, StateFromBeforeShardingIsCutAndUsed) {
  for (const NamedRun& optimizer : all_optimizers()) {
    const auto pretrain = [&](Net& net, Optimizer& plain) {
      for (int step = 0; step < 2; ++step) {
        plain.zero_grad();
        rank_loss(net, global_batch(step, 12, 37, 5), 0, 1, step).backward();
        plain.step();
      }
    };
    const auto alone = make_mlp();
    const auto plain = optimizer.make(alone->parameters());
    pretrain(*alone, *plain);
    plain->zero_grad();
    rank_loss(*alone, global_batch(2, 12, 37, 5), 0, 1, 2).backward();
    plain->step();
    for (const int ranks : {1, 2, 3}) {
      run_world(ranks, [&](World& world) {
        for (const bool fused : {false, true}) {
          const auto net = make_mlp();
          const auto inner = optimizer.make(net->parameters());
          pretrain(*net, *inner);
          auto sharded = fully_shard(net, {.unit_bytes = 6000});
          ShardedOptimizer step(sharded, *inner, {.fused = fused});
          step.zero_grad();
          rank_loss(*net, global_batch(2, 12, 37, 5), world.rank(), world.size(), 2).backward();
          step.step();
          expect_same_state(sharded.full_state(), plain_state(*alone), 1e-4,
                            fmt::format("{}, {} ranks, fused {}", optimizer.name, ranks, fused));
        }
      });
    }
  }
}

TEST(Optimizers, AClosureIsEvaluatedOnceWithGradientsEnabled) {
  run_world(2, [](World& world) {
    ShardedJob job(mlp_run(), world);
    torch::NoGradGuard no_grad;
    int calls = 0;
    const auto loss = job.optimizer.step([&] {
      ++calls;
      auto value = job.loss(0);
      value.backward();
      return value;
    });
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(loss.defined());
  });
}

// Runs refused calls on every rank, and expects no change.
void on_ranks(const std::function<void(World&, Sharded<Mlp>&)>& f) {
  on_worlds({1, 2, 3}, at_each_level({.unit_bytes = 6000}),
            [&](World& world, const ShardPlan& plan) {
              auto sharded = fully_shard(make_mlp(), plan);
              f(world, sharded);
              expect_same_state(sharded.full_state(), plain_state(*make_mlp()), 0, "unchanged");
            });
}

TEST(RefusedOptimizers, AStepBeforeABackwardSaysSo) {
  on_ranks([](World& world, Sharded<Mlp>& sharded) {
    AdamW inner(sharded->parameters(), AdamWOptions(0.1));
    ShardedOptimizer optimizer(sharded, inner);
    expect_error([&] { optimizer.step(); }, {"[step]", "backward"});
    rank_loss(*sharded, global_batch(0, 12, 37, 5), world.rank(), world.size(), 0).backward();
    optimizer.zero_grad();
    expect_error([&] { optimizer.step(); }, {"[step]", "zero_grad"});
    {
      const auto guard = sharded.no_sync();
      rank_loss(*sharded, global_batch(0, 12, 37, 5), world.rank(), world.size(), 0).backward();
    }
    expect_error([&] { optimizer.step(); }, {"[step]", "no_sync"});
    expect_error([&] { inner.step(); }, {"ShardedOptimizer::step()"});
  });
}

TEST(RefusedOptimizers, LbfgsNeedsMoreThanShards) {
  on_ranks([](World&, Sharded<Mlp>& sharded) {
    LBFGS inner(sharded->parameters());
    EXPECT_THROW(ShardedOptimizer(sharded, inner), c10::NotImplementedError);
    expect_error([&] { ShardedOptimizer optimizer(sharded, inner); }, {"LBFGS", "elementwise"});
  });
}

TEST(RefusedOptimizers, ForeignParametersAreNamedByPlaceAndShape) {
  on_ranks([](World& world, Sharded<Mlp>& sharded) {
    auto params = sharded->parameters();
    params.insert(params.begin() + 2, torch::zeros({37, 37}, torch::requires_grad()));
    SGD inner(params, 0.1);
    expect_error([&] { ShardedOptimizer optimizer(sharded, inner); },
                 {"parameter 2", "group 0", "[37, 37]", "fc0.weight"});
    EXPECT_TRUE(inner.param_groups()[0].params()[0].is_same(sharded->fcs[0]->weight));
    // On one rank only: the others report it.
    SGD good(sharded->parameters(), 0.1);
    SGD& mine = world.rank() == 0 ? inner : good;
    expect_error([&] { ShardedOptimizer optimizer(sharded, mine); }, {"parameter 2", "group 0"});
  });
}

TEST(RefusedOptimizers, AParameterInTwoParamGroupsIsNamed) {
  on_ranks([](World&, Sharded<Mlp>& sharded) {
    SGD inner({OptimizerParamGroup(sharded->parameters())}, SGDOptions(0.1));
    // LibTorch itself refuses the same tensor in two groups only in add_param_group().
    inner.param_groups().emplace_back(std::vector<torch::Tensor>{sharded->norm->bias},
                                      std::make_unique<SGDOptions>(0.2));
    expect_error([&] { ShardedOptimizer optimizer(sharded, inner); }, {"norm.bias", "0 and 1"});
  });
}

TEST(RefusedOptimizers, OptionsOfClippingMustFitAndBeUsed) {
  run_world(2, [&](World& world) {
    const auto net = make_mlp();
    const auto sharded = fully_shard(net);
    SGD sgd(net->parameters(), SGDOptions(0.1));
    const auto refuses = [&](const ShardedOptimizerOptions& options,
                             const std::vector<std::string>& what) {
      // On one rank only: the other reports it.
      const ShardedOptimizerOptions& own = world.rank() == 1 ? options : ShardedOptimizerOptions{};
      expect_error([&] { ShardedOptimizer(sharded, sgd, own); }, what);
    };
    refuses({.max_grad_norm = -1}, {"options.max_grad_norm", "-1"});
    refuses({.max_grad_norm = NAN}, {"options.max_grad_norm", "nan"});
    refuses({.clip = {.norm_type = 1}}, {"options.clip needs options.max_grad_norm"});
    refuses({.max_grad_norm = 1, .clip = {.norm_type = -2}}, {"norm_type", "-2"});
    refuses({.max_grad_norm = 1, .clip = {.epsilon = -1}}, {"epsilon", "-1"});
    refuses({.max_grad_norm = 1, .clip = {.exclude = {"fc9.weight"}}}, {"exclude", "fc9.weight"});
    ShardedOptimizer(sharded, sgd, {.max_grad_norm = 1});  // nothing was changed
  });
}

TEST(RefusedOptimizers, ASecondWrapOfModuleOrOptimizerIsRefused) {
  on_ranks([](World&, Sharded<Mlp>& sharded) {
    expect_error([&] { fully_shard(sharded.ptr()); }, {"[fully_shard]", "fc0.weight", "already"});
    expect_error([&] { fully_shard(sharded->head.ptr()); }, {"[fully_shard]", "already"});
    SGD inner(sharded->parameters(), 0.1);
    ShardedOptimizer optimizer(sharded, inner);
    expect_error([&] { ShardedOptimizer second(sharded, inner); },
                 {"[ShardedOptimizer]", "must be the model's"});
  });
}

TEST(Optimizers, OneModelMayHaveSeveral) {
  const auto train = [](Mlp& net, const std::function<void()>& step_a,
                        const std::function<void()>& step_b, int rank, int size) {
    for (int step = 0; step < 4; ++step) {
      rank_loss(net, global_batch(step, 12, 37, 5), rank, size, step).backward();
      step % 2 ? step_a() : step_b();
    }
  };
  const auto head = [](Mlp& net) { return net.head->parameters(); };
  const auto body = [](Mlp& net) { return net.fcs[0]->parameters(); };
  const auto alone = make_mlp();
  SGD a(head(*alone), 0.1), b(body(*alone), 0.2);
  const auto step_alone = [&](SGD& optimizer) {
    return [&] {
      optimizer.step();
      a.zero_grad();
      b.zero_grad();
      alone->zero_grad();
    };
  };
  train(*alone, step_alone(a), step_alone(b), 0, 1);
  for (const int ranks : kRanks) {
    run_world(ranks, [&](World& world) {
      const auto net = make_mlp();
      SGD inner_a(head(*net), 0.1), inner_b(body(*net), 0.2);
      auto sharded = fully_shard(net, {.unit_bytes = 6000});
      ShardedOptimizer first(sharded, inner_a), second(sharded, inner_b);
      const auto step = [&](ShardedOptimizer& optimizer) {
        return [&] {
          optimizer.step();
          sharded.zero_grad();
        };
      };
      train(*net, step(first), step(second), world.rank(), world.size());
      expect_same_state(sharded.full_state(), plain_state(*alone), 1e-5,
                        fmt::format("{} ranks", ranks));
    });
  }
}

// As of a GAN's trunk: each backward reaches the parameters of all, and each optimizer has its
// turn.
template <class Step, class Clear>
void train_in_turns(Mlp& net, const std::vector<Step>& steps, const std::vector<Clear>& clears,
                    int rank, int size) {
  for (int step = 0; step < 6; ++step) {
    rank_loss(net, global_batch(step, 12, 37, 5), rank, size, step).backward();
    steps[step % 2]();
    clears[step % 2](/*set_to_none=*/step < 4);
  }
}

TEST(Optimizers, ZeroGradLeavesTheGradientsOfOthers) {
  const auto parts = [](Mlp& net) {
    std::vector<std::vector<torch::Tensor>> parts(2);
    for (const auto& item : net.named_parameters())
      parts[item.key().starts_with("fc0")].push_back(item.value());
    return parts;
  };
  using Step = std::function<void()>;
  using Clear = std::function<void(bool)>;
  const auto alone = make_mlp();
  SGD a(parts(*alone)[0], 0.1), b(parts(*alone)[1], 0.2);
  train_in_turns<Step, Clear>(
      *alone, {[&] { a.step(); }, [&] { b.step(); }},
      {[&](bool none) { a.zero_grad(none); }, [&](bool none) { b.zero_grad(none); }}, 0, 1);
  for (const int64_t unit_bytes : {0, 6000}) {
    on_worlds({1, 2, 3, 4}, at_each_level({.unit_bytes = unit_bytes}),
              [&](World& world, const ShardPlan& plan) {
                const auto net = make_mlp();
                SGD inner_a(parts(*net)[0], 0.1), inner_b(parts(*net)[1], 0.2);
                auto sharded = fully_shard(net, plan);
                ShardedOptimizer first(sharded, inner_a), second(sharded, inner_b);
                train_in_turns<Step, Clear>(*net, {[&] { first.step(); }, [&] { second.step(); }},
                                            {[&](bool none) { first.zero_grad(none); },
                                             [&](bool none) { second.zero_grad(none); }},
                                            world.rank(), world.size());
                expect_same_state(sharded.full_state(), plain_state(*alone), 1e-5, "in turns");
              });
  }
}

// Steps each parameter by its gradient's direction: not elementwise.
struct Direction : SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (const torch::Tensor& param : group.params()) {
        const torch::Tensor& grad = param.grad();
        if (grad.defined()) param.sub_(grad / grad.norm(), group.options().get_lr());
      }
    }
    return {};
  }
};

struct Sign : SGD {
  using SGD::SGD;
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (const torch::Tensor& param : group.params())
        if (param.grad().defined()) param.sub_(param.grad().sign(), group.options().get_lr());
    }
    return {};
  }
};

TEST(RefusedOptimizers, OneThatMayNeedWholeParametersIsRefusedOnPartsOfThem) {
  on_ranks([](World&, Sharded<Mlp>& sharded) {
    Direction inner(sharded->parameters(), 0.1);
    EXPECT_THROW(ShardedOptimizer(sharded, inner), c10::NotImplementedError);
    expect_error([&] { ShardedOptimizer optimizer(sharded, inner); },
                 {"[ShardedOptimizer]", "elementwise", "fc0.weight", "Direction",
                  "Partition::kWholeParam", "elementwise = true"});
    EXPECT_TRUE(inner.param_groups()[0].params()[0].is_same(sharded->fcs[0]->weight));
  });
}

TEST(Optimizers, ADeclarationHoldsForParametersAddedLater) {
  run_world(2, [](World& world) {
    const auto net = make_mlp();
    auto sharded = fully_shard(net);
    Sign inner({net->head->weight}, 0.1);
    ShardedOptimizer optimizer(sharded, inner, {.elementwise = true});
    inner.add_param_group(std::vector<torch::Tensor>{net->head->bias});
    rank_loss(*net, global_batch(0, 12, 37, 5), world.rank(), world.size(), 0).backward();
    optimizer.step();
    EXPECT_EQ(inner.param_groups().size(), 2u);
  });
}

TEST(Optimizers, OneThatNeedsWholeParametersHasThemUnderWholeParam) {
  TrainingRun run = mlp_run();
  run.make_optimizer = [](Net& net) {
    return std::make_unique<Direction>(net.parameters(), SGDOptions(0.1));
  };
  for (const int ranks : kRanks)
    expect_parity_of_each(run, ranks,
                          cases_of(at_each_level({.partition = Partition::kWholeParam})));
}

TEST(Optimizers, OneOfTheUsersStepsOnPartsIfDeclaredElementwise) {
  TrainingRun run = mlp_run();
  run.make_optimizer = [](Net& net) {
    return std::make_unique<Sign>(net.parameters(), SGDOptions(0.1));
  };
  std::vector<ParityCase> cases = cases_of(at_each_level());
  for (ParityCase& item : cases) item.options = {.elementwise = true};
  for (const int ranks : {1, 2, 4}) expect_parity_of_each(run, ranks, cases);
}

}  // namespace tessera::testing::optimizer_test
