// Steps of the optimizer that are left to who uses the parameters, where ranks share memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <latch>
#include <thread>

#include "model/sharded_state.h"
#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace deferred_step_test {

using namespace testing;

constexpr ShardLevel kSharedLevels[] = {ShardLevel::kOptimizerState, ShardLevel::kGradients,
                                        ShardLevel::kParameters};

// Uses one of its layers in every other step only, one twice, and has one that is frozen.
struct Fickle : Net {
  Fickle() {
    for (int i = 0; i < 4; ++i)
      fcs.push_back(register_module("fc" + std::to_string(i), torch::nn::Linear(37, 37)));
    head = register_module("head", torch::nn::Linear(37, 5));
    fcs[3]->weight.set_requires_grad(false);
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::gelu(fcs[0]->forward(x));
    if (step % 2 == 0) x = torch::gelu(fcs[1]->forward(x));
    x = torch::gelu(fcs[2]->forward(fcs[2]->forward(x)));
    return head->forward(fcs[3]->forward(x));
  }
  std::vector<torch::nn::Linear> fcs;
  torch::nn::Linear head{nullptr};
};

struct Recipe {
  bool amsgrad = false;
  bool is_adam = false;
  bool keeps_gradients = false;  // now and then no zero_grad()
  Partition partition = Partition::kFlatEven;
};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(Net& net, const Recipe& recipe) {
  std::vector<torch::Tensor> weights, rest;
  for (const auto& parameter : net.parameters())
    (parameter.dim() > 1 ? weights : rest).push_back(parameter);
  std::vector<torch::optim::OptimizerParamGroup> groups{weights, rest};
  if (recipe.is_adam)
    return std::make_unique<torch::optim::Adam>(
        groups, torch::optim::AdamOptions(0.01).amsgrad(recipe.amsgrad).weight_decay(0.1));
  return std::make_unique<torch::optim::AdamW>(
      groups, torch::optim::AdamWOptions(0.01).amsgrad(recipe.amsgrad).weight_decay(0.1));
}

void set_lr(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

template <class N>
std::vector<NamedTensor> train(World& world, const Recipe& recipe, ShardLevel level, bool defer) {
  const auto net = seeded(7, [] { return std::make_shared<N>(); });
  const auto inner = make_optimizer(*net, recipe);
  auto sharded =
      fully_shard(net, {.level = level, .partition = recipe.partition, .unit_bytes = 4000});
  ShardedOptimizer optimizer(sharded, *inner, {.defer = defer});
  for (int step = 0; step < 6; ++step) {
    const Batch batch = global_batch(step, 12, 37, 5);
    if (step % 3 != 1 || !recipe.keeps_gradients) optimizer.zero_grad();
    if (step % world.size() == world.rank())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    rank_loss(*net, batch, world.rank(), world.size(), step).backward();
    optimizer.step();
    const auto& units = sharded.state()->units();
    const bool defers = std::any_of(units.begin(), units.end(),
                                    [](const auto& unit) { return unit->is_updating(); });
    EXPECT_EQ(defers, defer && world.size() > 1);
    // A scheduler does this. The step that waits was called before.
    set_lr(*inner, 0.01 / (step + 2));
  }
  auto state = sharded.full_state();
  for (auto& [number, values] : full_state_dict(optimizer, world.size() - 1).state)
    for (auto& [name, value] : values)
      if (value.isTensor()) state.push_back({std::to_string(number) + name, value.toTensor()});
  return state;
}

template <class N>
void expect_same_as_at_once(const Recipe& recipe, const std::string& what) {
  for (const int ranks : {1, 2, 3}) {
    for (const auto level : kSharedLevels) {
      std::array<std::vector<NamedTensor>, 2> states;
      for (const bool defer : {false, true}) {
        run_arena(ranks, [&](World& world) {
          auto state = train<N>(world, recipe, level, defer);
          if (world.rank() == ranks - 1) states[defer] = std::move(state);
        });
      }
      expect_same_state(states[1], states[0], 0, what + ", " + std::to_string(ranks) + " ranks");
    }
  }
}

TEST(DeferredStep, HasTheBitsOfOneAtOnce) {
  expect_same_as_at_once<Mlp>({}, "AdamW");
  expect_same_as_at_once<Mlp>({.amsgrad = true, .is_adam = true}, "Adam with AMSGrad");
  expect_same_as_at_once<Mlp>({.partition = Partition::kWholeParam}, "whole parameters");
}

TEST(DeferredStep, UnitsThatAStepDoesNotUseAreUpdatedAllTheSame) {
  expect_same_as_at_once<Fickle>({}, "unused units");
  expect_same_as_at_once<Fickle>({.keeps_gradients = true}, "gradients that add up");
}

// A model on two ranks after one step.
struct Stepped {
  explicit Stepped(bool defer = true)
      : net(seeded(7, [] { return std::make_shared<Mlp>(); })),
        inner(net->parameters(), torch::optim::AdamWOptions(0.1)),
        sharded(fully_shard(net)),
        optimizer(sharded, inner, {.defer = defer}) {
    net->forward(torch::ones({4, 37})).pow(2).sum().backward();
    optimizer.step();
  }
  ~Stepped() {
    // Nobody leaves as long as another one tests.
    sharded.full_state();
  }

  std::shared_ptr<Mlp> net;
  torch::optim::AdamW inner;
  Sharded<Mlp> sharded;
  ShardedOptimizer optimizer;
};

torch::Tensor first_param(torch::optim::Optimizer& inner) {
  for (const auto& param : inner.param_groups()[0].params())
    if (param.numel() > 0) return param;
  return {};
}

torch::Tensor exp_avg_of(torch::optim::Optimizer& inner) {
  const auto& state = *inner.state().at(first_param(inner).unsafeGetTensorImpl());
  return static_cast<const torch::optim::AdamWParamState&>(state).exp_avg();
}

struct Seen {
  torch::Tensor exp_avg, param, output;
};

// What is seen when `look` is the first that looks.
template <class F>
std::array<Seen, 2> seen_after_step(bool defer, F&& look) {
  std::array<Seen, 2> seen;
  run_arena(2, [&](World& world) {
    torch::NoGradGuard no_grad;
    at::AutoGradMode grad_mode(true);
    Stepped job(defer);
    Seen& mine = seen[world.rank()];
    mine = look(job);
    if (!mine.exp_avg.defined()) mine.exp_avg = exp_avg_of(job.optimizer.inner()).clone();
    if (!mine.param.defined()) mine.param = first_param(job.optimizer.inner()).detach().clone();
    if (!mine.output.defined()) mine.output = job.net->forward(torch::ones({1, 37})).detach();
  });
  return seen;
}

template <class F>
void expect_seen(F&& look) {
  const auto at_once = seen_after_step(false, [](Stepped&) { return Seen{}; });
  const auto deferred = seen_after_step(true, look);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(torch::equal(deferred[rank].exp_avg, at_once[rank].exp_avg)) << "rank " << rank;
    EXPECT_TRUE(torch::equal(deferred[rank].param, at_once[rank].param)) << "rank " << rank;
    EXPECT_TRUE(torch::equal(deferred[rank].output, at_once[rank].output)) << "rank " << rank;
  }
}

TEST(DeferredStep, OperatorsOnTheOptimizersStateWaitForIt) {
  expect_seen([](Stepped& job) { return Seen{.exp_avg = exp_avg_of(job.inner).clone()}; });
}

TEST(DeferredStep, OperatorsOnTheOptimizersParametersWaitForIt) {
  expect_seen([](Stepped& job) { return Seen{.param = first_param(job.inner).detach().clone()}; });
}

TEST(DeferredStep, AskingForTheOptimizerWaitsForIt) {
  expect_seen([](Stepped& job) {
    torch::optim::Optimizer& inner = job.optimizer.inner();
    const auto exp_avg = exp_avg_of(inner);
    return Seen{.exp_avg = torch::from_blob(exp_avg.data_ptr(), exp_avg.sizes()).clone()};
  });
}

TEST(DeferredStep, AForwardWaitsForIt) {
  expect_seen([](Stepped& job) {
    return Seen{.output = job.net->forward(torch::ones({1, 37})).detach()};
  });
}

TEST(DeferredStep, RawPointersAreRefusedUntilItIsOver) {
  run_arena(2, [](World&) {
    Stepped job;
    expect_error([&] { exp_avg_of(job.inner).data_ptr(); },
                 {"the optimizer's last step", "is not over", "ShardedOptimizer::inner()"});
    expect_error([&] { first_param(job.inner).data_ptr(); }, {"is not over"});
    job.optimizer.inner();
    EXPECT_NE(exp_avg_of(job.inner).data_ptr(), nullptr);
    EXPECT_NE(first_param(job.inner).data_ptr(), nullptr);
  });
}

// One rank does the work of both, and needs nothing more of the other.
TEST(DeferredStep, OneRankMayUseTheModelAlone) {
  std::latch done(1);
  run_arena(2, [&](World& world) {
    Stepped job;
    if (world.rank() == 0) {
      torch::NoGradGuard no_grad;
      const auto output = job.net->forward(torch::ones({1, 37}));
      done.count_down();
      EXPECT_TRUE(torch::equal(job.net->forward(torch::ones({1, 37})), output));
    } else {
      done.wait();
    }
  });
}

TEST(DeferredStep, TheStateIsThereWhenTheModelIsGone) {
  std::array<std::array<torch::Tensor, 2>, 2> exp_avgs;
  for (const bool defer : {false, true}) {
    run_arena(2, [&](World& world) {
      auto net = seeded(7, [] { return std::make_shared<Mlp>(); });
      torch::optim::AdamW inner(net->parameters(), torch::optim::AdamWOptions(0.1));
      {
        auto sharded = fully_shard(net);
        ShardedOptimizer optimizer(sharded, inner, {.defer = defer});
        net->forward(torch::ones({4, 37})).pow(2).sum().backward();
        optimizer.step();
        net.reset();
      }
      exp_avgs[defer][world.rank()] = exp_avg_of(inner).clone();
    });
  }
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_TRUE(torch::equal(exp_avgs[true][rank], exp_avgs[false][rank]));
}

// The kinds that are stepped at once, on request or because no kernel can be shared.
TEST(DeferredStep, IsNotUsedWhereItIsNotWantedOrNotKnown) {
  run_arena(2, [](World&) {
    Stepped job(/*defer=*/false);
    EXPECT_NE(exp_avg_of(job.inner).data_ptr(), nullptr);
  });
  run_arena(2, [](World&) {
    auto net = seeded(7, [] { return std::make_shared<Mlp>(); });
    torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
    auto sharded = fully_shard(net);
    ShardedOptimizer optimizer(sharded, inner);
    net->forward(torch::ones({4, 37})).pow(2).sum().backward();
    optimizer.step();
    EXPECT_NE(first_param(inner).data_ptr(), nullptr);
    sharded.full_state();
  });
}

// More of them than the arena has places for: the first are over before the last are shown.
TEST(DeferredStep, ThereMayBeVeryManyUnits) {
  std::array<std::vector<NamedTensor>, 2> states;
  for (const bool defer : {false, true}) {
    run_arena(2, [&](World& world) {
      torch::nn::Sequential net;
      for (int i = 0; i < 150; ++i) net->push_back(torch::nn::Linear(5, 5));
      for (auto& parameter : net->parameters()) {
        torch::NoGradGuard no_grad;
        parameter.fill_(0.1);
      }
      torch::optim::AdamW inner(net->parameters(), torch::optim::AdamWOptions(0.1));
      auto sharded = fully_shard(net.ptr(), {.unit_bytes = 0});
      ShardedOptimizer optimizer(sharded, inner, {.defer = defer});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        net->forward(torch::full({2, 5}, 1. + world.rank())).pow(2).sum().backward();
        optimizer.step();
      }
      if (world.rank() == 1) {
        states[defer] = sharded.full_state();
      } else {
        sharded.full_state();
      }
    });
  }
  EXPECT_EQ(states[0].size(), 300);
  expect_same_state(states[1], states[0], 0, "300 units");
}

// They are kept until the step is over, and no longer.
TEST(DeferredStep, GradientsOfTheLastStepAreLetGo) {
  // A rank that uses the model does the step for all, and so does one that waits for others in a
  // collective.
  std::barrier ranks_look(2);
  run_arena(2, [&](World&) {
    Stepped job;
    const int64_t kept = job.sharded.memory().gradients;
    EXPECT_GT(kept, 0);
    ranks_look.arrive_and_wait();
    for (int step = 0; step < 3; ++step) {
      job.optimizer.zero_grad();
      EXPECT_EQ(job.sharded.memory().gradients, kept) << "the step has not read them yet";
      ranks_look.arrive_and_wait();
      job.net->forward(torch::ones({4, 37})).pow(2).sum().backward();
      job.optimizer.step();
      EXPECT_EQ(job.sharded.memory().gradients, kept) << "those of one step";
      ranks_look.arrive_and_wait();
    }
  });
}

// Ranks may even differ in it, as when one has loaded state that the kernel does not take.
TEST(DeferredStep, RanksMayDifferInIt) {
  std::array<std::vector<NamedTensor>, 2> states;
  for (const bool differs : {false, true}) {
    run_arena(3, [&](World& world) {
      auto state = train<Mlp>(world, {}, ShardLevel::kGradients, differs && world.rank() != 1);
      if (world.rank() == 2) states[differs] = std::move(state);
    });
  }
  expect_same_state(states[1], states[0], 0, "rank 1 steps at once");
}

}  // namespace deferred_step_test
}  // namespace tessera
