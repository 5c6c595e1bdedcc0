// User hooks on gradients of sharded parameters.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>

#include "engine/model/sharded_state.h"
#include "support/models.h"

namespace tessera::testing::grad_hook_test {

using Hook = std::function<void(const torch::Tensor&)>;
using torch::autograd::PostAccumulateGradHook;

struct CalledHook final : PostAccumulateGradHook {
  explicit CalledHook(Hook f) : f(std::move(f)) {}
  void operator()(const torch::Tensor& tensor) override { f(tensor); }
  Hook f;
};

void set_hook(const torch::Tensor& tensor, Hook f) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      tensor, f ? std::make_unique<CalledHook>(std::move(f)) : nullptr);
}

std::shared_ptr<Mlp> make_mlp() {
  return seeded(7, [] { return std::make_shared<Mlp>(37, 2, 5); });
}

torch::Tensor loss_of(Mlp& net, int rank, int size, int step = 0) {
  return rank_loss(net, global_batch(step, 12, 37, 5), rank, size, step);
}

// The gradient of fc0's weight on one rank, before any reduction.
torch::Tensor local_gradient(int rank, int size, int step = 0) {
  const auto net = make_mlp();
  loss_of(*net, rank, size, step).backward();
  return net->fcs[0]->weight.grad();
}

torch::Tensor mean_of(int size, const std::function<torch::Tensor(const torch::Tensor&)>& change) {
  torch::Tensor sum = torch::zeros({37, 37}, test_device());
  for (int rank = 0; rank < size; ++rank) sum += change(local_gradient(rank, size));
  return sum / size;
}

void expect_gradient(ShardedModule& sharded, const torch::Tensor& expected) {
  const auto got = sharded.full_grad("fc0.weight");
  ASSERT_TRUE(got.defined());
  EXPECT_TRUE(torch::allclose(got, expected, 1e-5, 1e-7)) << (got - expected).abs().max();
}

void on_sizes(const std::function<void(World&, const ShardPlan&)>& f) {
  on_worlds({1, 2, 3}, at_each_level({.unit_bytes = 6000}), f);
}

// The model with a hook on fc0's weight, set before or after it is sharded.
Sharded<Mlp> shard_with_hook(const ShardPlan& plan, bool before, Hook hook) {
  const auto net = make_mlp();
  if (before) set_hook(net->fcs[0]->weight, hook);
  auto sharded = fully_shard(net, plan);
  if (!before) set_hook(net->fcs[0]->weight, hook);
  return sharded;
}

TEST(GradHook, OfTheUserSeesThisRanksGradientAndTheGradientIsReducedAllTheSame) {
  for (const bool before : {true, false}) {
    on_sizes([&](World& world, const ShardPlan& plan) {
      SCOPED_TRACE(before ? "set before the wrap" : "set after it");
      std::vector<torch::Tensor> seen;
      auto sharded = shard_with_hook(plan, before, [&](const torch::Tensor& weight) {
        seen.push_back(weight.grad().clone());
      });
      torch::optim::SGD inner(sharded->parameters(), 0.1);
      ShardedOptimizer optimizer(sharded, inner);
      const auto start = sharded->fcs[0]->weight.detach().clone();
      loss_of(*sharded, world.rank(), world.size()).backward();
      ASSERT_EQ(seen.size(), 1U);
      EXPECT_TRUE(torch::equal(seen[0], local_gradient(world.rank(), world.size())));
      const auto mean = mean_of(world.size(), [](const auto& gradient) { return gradient; });
      expect_gradient(sharded, mean);
      optimizer.step();
      EXPECT_TRUE(torch::allclose(sharded->fcs[0]->weight * 1, start - 0.1 * mean, 1e-5, 1e-7));
    });
  }
}

TEST(GradHook, WhatItMakesOfAGradientIsReduced) {
  const std::vector<std::pair<Hook, std::function<torch::Tensor(const torch::Tensor&)>>> hooks = {
      {[](const auto& weight) { weight.mutable_grad().clamp_(-1e-3, 1e-3); },
       [](const auto& gradient) { return gradient.clamp(-1e-3, 1e-3); }},
      {[](const auto& weight) { weight.mutable_grad() = weight.grad().sign(); },
       [](const auto& gradient) { return gradient.sign(); }}};
  for (const auto& hook : hooks) {
    for (const bool before : {true, false}) {
      on_sizes([&](World& world, const ShardPlan& plan) {
        auto sharded = shard_with_hook(plan, before, hook.first);
        loss_of(*sharded, world.rank(), world.size()).backward();
        expect_gradient(sharded, mean_of(world.size(), hook.second));
      });
    }
  }
}

TEST(GradHook, SetAgainReplacesTheOneBeforeAndNoneTakesItAway) {
  on_sizes([](World& world, const ShardPlan& plan) {
    int first = 0, second = 0;
    auto sharded = shard_with_hook(plan, /*before=*/true, [&](const auto&) { ++first; });
    const auto backward = [&] {
      sharded.zero_grad();
      loss_of(*sharded, world.rank(), world.size()).backward();
      expect_gradient(sharded, mean_of(world.size(), [](const auto& g) { return g; }));
    };
    backward();
    set_hook(sharded->fcs[0]->weight, [&](const auto&) { ++second; });
    backward();
    backward();
    set_hook(sharded->fcs[0]->weight, nullptr);
    backward();
    EXPECT_EQ(first, 1);
    EXPECT_EQ(second, 2);
  });
}

TEST(GradHook, PutAroundTheOneThatIsThereReducesOnce) {
  on_sizes([](World& world, const ShardPlan& plan) {
    auto sharded = fully_shard(make_mlp(), plan);
    std::unique_ptr<PostAccumulateGradHook>& place =
        torch::autograd::impl::post_acc_grad_hooks(sharded->fcs[0]->weight);
    ASSERT_TRUE(place);
    int calls = 0;
    const std::shared_ptr<PostAccumulateGradHook> inner = std::move(place);
    set_hook(sharded->fcs[0]->weight, [&calls, inner](const torch::Tensor& weight) {
      ++calls;
      (*inner)(weight);
    });
    loss_of(*sharded, world.rank(), world.size()).backward();
    expect_gradient(sharded, mean_of(world.size(), [](const auto& g) { return g; }));
    EXPECT_EQ(calls, 1);
  });
}

TEST(GradHook, ThatClearsTheGradientLeavesNone) {
  on_sizes([](World& world, const ShardPlan& plan) {
    // On all ranks, then on one of them.
    for (const int clearing : {-1, 0}) {
      auto sharded = shard_with_hook(plan, true, [&](const torch::Tensor& weight) {
        if (clearing < 0 || clearing == world.rank()) weight.mutable_grad().reset();
      });
      loss_of(*sharded, world.rank(), world.size()).backward();
      EXPECT_TRUE(sharded.full_grad("fc0.bias").defined());
      if (clearing < 0 || world.size() == 1) {
        EXPECT_FALSE(sharded.full_grad("fc0.weight").defined());
        continue;
      }
      torch::Tensor others = torch::zeros({37, 37}, test_device());
      for (int rank = 1; rank < world.size(); ++rank) others += local_gradient(rank, world.size());
      expect_gradient(sharded, others / world.size());
    }
  });
}

TEST(GradHook, ThatGivesAGradientOfAnotherShapeIsToldSo) {
  run_world(1, [](World& world) {
    // Its strides are those of a smaller parameter.
    auto sharded = shard_with_hook({}, true, [](const torch::Tensor& weight) {
      weight.mutable_grad() = torch::ones({3, 37}, test_device());
    });
    expect_error([&] { loss_of(*sharded, world.rank(), world.size()).backward(); },
                 {"fc0.weight", "[37, 37]", "[3, 37]"});
  });
}

TEST(GradHook, ThatThrowsFailsTheBackwardAndLeavesNothing) {
  on_sizes([](World& world, const ShardPlan& plan) {
    if (world.size() > 1) return;  // the other ranks would wait for this one
    bool throws = true;
    auto sharded =
        shard_with_hook(plan, true, [&](const auto&) { TORCH_CHECK(!throws, "the user's own"); });
    expect_error([&] { loss_of(*sharded, 0, 1).backward(); }, {"the user's own"});
    throws = false;
    sharded.zero_grad();
    loss_of(*sharded, 0, 1).backward();
    expect_gradient(sharded, local_gradient(0, 1));
  });
}

TEST(GradHook, OnTheTensorItselfChangesTheGradientThatIsReduced) {
  for (const bool before : {true, false}) {
    on_sizes([&](World& world, const ShardPlan& plan) {
      const auto net = make_mlp();
      int seen = 0;
      const auto hook = [&] {
        net->fcs[0]->weight.register_hook([&](const torch::Tensor&) { ++seen; });
        net->fcs[0]->weight.register_hook(
            [](const torch::Tensor& gradient) { return 2 * gradient; });
      };
      if (before) hook();
      auto sharded = fully_shard(net, plan);
      if (!before) hook();
      loss_of(*sharded, world.rank(), world.size()).backward();
      expect_gradient(sharded, mean_of(world.size(), [](const auto& g) { return 2 * g; }));
      EXPECT_EQ(seen, 1);
    });
  }
}

TEST(GradHook, IsTheUsersAloneAgainWhenTheModelIsGivenBack) {
  on_sizes([](World& world, const ShardPlan& plan) {
    int calls = 0;
    const auto net = make_mlp();
    set_hook(net->fcs[0]->weight, [&](const auto&) { ++calls; });
    {
      auto sharded = fully_shard(net, plan);
      sharded.state()->give_back(GivenValues::kUsed);
    }
    loss_of(*net, world.rank(), world.size()).backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(
        torch::equal(net->fcs[0]->weight.grad(), local_gradient(world.rank(), world.size())));
  });
}

// Other code may have replaced our metadata by its own.
TEST(GradHook, WhoseMetadataIsGoneIsMissedAtTheEndOfBackwardOnAllRanks) {
  on_sizes([](World& world, const ShardPlan& plan) {
    auto sharded = fully_shard(make_mlp(), plan);
    if (world.rank() == 0) {
      const auto& weight = sharded->fcs[0]->weight;
      weight.unsafeGetTensorImpl()->set_autograd_meta(
          std::make_unique<torch::autograd::AutogradMeta>(weight.unsafeGetTensorImpl(), true));
    }
    expect_error([&] { loss_of(*sharded, world.rank(), world.size()).backward(); },
                 {"fc0.weight", "rank 0"});
  });
}

TEST(GradHook, AGradientSetByHandIsNotSteppedOnSilentlyAndReduceTakesIt) {
  on_sizes([](World& world, const ShardPlan& plan) {
    auto sharded = fully_shard(make_mlp(), plan);
    torch::optim::SGD inner(sharded->parameters(), 0.1);
    ShardedOptimizer optimizer(sharded, inner);
    const auto start = sharded->fcs[0]->weight.detach().clone();
    const auto by_hand = [&] {
      return torch::full({37, 37}, 1. + static_cast<double>(world.rank()), test_device());
    };
    const double mean = (1. + world.size()) / 2;
    loss_of(*sharded, world.rank(), world.size()).backward();
    sharded->fcs[0]->weight.mutable_grad() = by_hand();
    expect_error([&] { optimizer.step(); }, {"fc0.weight", "reduce()"});
    sharded.reduce();
    expect_gradient(sharded, torch::full({37, 37}, mean, test_device()));
    optimizer.step();
    EXPECT_TRUE(torch::allclose(sharded->fcs[0]->weight * 1, start - 0.1 * mean, 1e-5, 1e-6));
    // Also without a backward, and cleared like others.
    optimizer.zero_grad();
    sharded->fcs[0]->weight.mutable_grad() = by_hand();
    sharded.reduce();
    expect_gradient(sharded, torch::full({37, 37}, mean, test_device()));
    sharded->fcs[0]->weight.mutable_grad() = by_hand();
    sharded.zero_grad();
    EXPECT_FALSE(sharded.full_grad("fc0.weight").defined());
  });
}

TEST(GradHook, AGradientSetByHandCountsInTheNextBackward) {
  on_sizes([](World& world, const ShardPlan& plan) {
    auto sharded = fully_shard(make_mlp(), plan);
    sharded->fcs[0]->weight.mutable_grad() = torch::ones({37, 37}, test_device());
    loss_of(*sharded, world.rank(), world.size()).backward();
    expect_gradient(sharded, mean_of(world.size(), [](const auto& g) { return g + 1; }));
    // Also for a parameter that the backward does not use.
    sharded.zero_grad();
    sharded->fcs[0]->weight.mutable_grad() = torch::ones({37, 37}, test_device());
    sharded->head->weight.square().sum().backward();
    expect_gradient(sharded, torch::ones({37, 37}, test_device()));
  });
}

}  // namespace tessera::testing::grad_hook_test
