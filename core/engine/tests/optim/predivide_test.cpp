// Gradients that are divided before they are sent.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/message/gloo_backend.h"
#include "engine/model/sharded_state.h"
#include "support/sharded_job.h"

namespace tessera::testing::predivide_test {

constexpr int64_t kWidth = 37, kOut = 5;

State train(World& world, const ShardPlan& plan) {
  TrainingRun run = sgd_run<Mlp>(kWidth, 3, kOut);
  run.steps = 3;
  return train_sharded(run, world, plan);
}

TEST(Predivide, ByPowersOfTwoChangesNoBit) {
  for (const auto transport : kTransports) {
    for (const bool average : {true, false}) {
      on_worlds(
          {1, 2, 3}, with_each_partition({.unit_bytes = 6000, .average = average}),
          [&](World& world, ShardPlan plan) {
            const State expected = train(world, plan);
            plan.predivide = average ? 4 : 0.5;
            expect_same_state(train(world, plan), expected, 0, "divided");
          },
          transport);
    }
  }
}

TEST(Predivide, ByOtherNumbersAgreesToRounding) {
  for (const int ranks : {1, 2, 3}) {
    const auto compare = [](World& world) {
      ShardPlan plan{.unit_bytes = 6000};
      const auto expected = train(world, plan);
      plan.predivide = 3;
      expect_same_state(train(world, plan), expected, 2e-6, "by 3");
    };
    run_over(Transport::kGloo, ranks, compare);
  }
}

TEST(Predivide, WithReplicasAndSeveralBackwardsChangesNoBit) {
  const auto run = sgd_run<Mlp>(kWidth, 3, kOut);
  run_world(4, [&](World& world) {
    std::vector<State> states;
    for (const double predivide : {1, 8}) {
      const auto groups = world.hybrid_process_groups(2);
      ShardedJob job(run, world,
                     {.predivide = predivide,
                      .process_group = groups.shard,
                      .replicate_group = groups.replicate});
      for (int step = 0; step < 2; ++step) {
        job.optimizer.zero_grad();
        job.backward_without_sync(10 * step);
        for (int i = 1; i < 3; ++i) job.backward(10 * step + i);
        job.optimizer.step();
      }
      states.push_back(job.state());
    }
    expect_same_state(states[1], states[0], 0, "replicas");
  });
}

// Parameters whose gradient is the input: a small one, and one that is a message by itself.
struct Given : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return ((small.sum() + large.sum()) * x).sum(); }
  torch::Tensor small = register_parameter("small", torch::zeros({3}));
  torch::Tensor large = register_parameter("large", torch::zeros({40000}));
};

// The reduced gradients, all elements being equal, of ranks whose own are `gradients`.
struct Reduced {
  double small = 0, large = 0;
};
Reduced reduce(const std::vector<float>& gradients, const ShardPlan& wanted,
               bool on_backend = false, bool is_half = false) {
  Reduced result;
  run_world(static_cast<int>(gradients.size()), [&](World& world) {
    ShardPlan plan = wanted;
    if (on_backend) {
      const auto keys = c10::make_intrusive<c10d::PrefixStore>("backend", world.store());
      const auto timeout = world.process_group()->timeout();
      plan.process_group = backend_process_group(
          gloo_backend(keys, world.rank(), world.size(), timeout, "127.0.0.1"), timeout);
    }
    const auto net = std::make_shared<Given>();
    if (is_half) net->to(torch::kHalf);
    auto sharded = fully_shard(net, plan);
    sharded.forward(torch::full({}, gradients[world.rank()]).to(net->small.dtype())).backward();
    const auto small = sharded.full_grad("small"), large = sharded.full_grad("large");
    EXPECT_TRUE(small.equal(small[0].expand_as(small)));
    EXPECT_TRUE(large.equal(large[0].expand_as(large)));
    if (world.rank() == 0) result = {small[0].item<double>(), large[0].item<double>()};
  });
  return result;
}

// Sums are taken in float, so only a rank's own gradient can overflow in half precision.
TEST(Predivide, KeepsLargeFloatGradientsInTheRangeOfHalfMessages) {
  const ShardPlan once{.precision = {.reduce_dtype = at::kHalf}};
  ShardPlan divided = once;
  divided.predivide = 4;
  EXPECT_TRUE(std::isinf(reduce({100000, 100000}, once).small));
  EXPECT_TRUE(std::isinf(reduce({100000, 100000}, once).large));
  const double sent = at::scalar_tensor(25000, at::kHalf).item<double>() * 4;
  EXPECT_EQ(reduce({100000, 100000}, divided).small, sent);
  EXPECT_EQ(reduce({100000, 100000}, divided).large, sent);
  // This sum does not fit into half, and needs no division.
  ShardPlan sum = once;
  sum.average = false;
  EXPECT_EQ(reduce({60000, 60000, 60000}, sum).large, 180000);
}

TEST(Predivide, LosesWhatFallsBelowTheRangeOfHalfMessages) {
  constexpr float kSmallest = 0x1p-24F;  // the smallest positive half
  const ShardPlan once{.precision = {.reduce_dtype = at::kHalf}};
  ShardPlan divided = once;
  divided.predivide = 4;
  EXPECT_EQ(reduce({kSmallest, kSmallest}, once).small, kSmallest);
  EXPECT_EQ(reduce({kSmallest, kSmallest}, divided).small, 0);
  EXPECT_EQ(reduce({kSmallest, kSmallest}, divided).large, 0);
  // Sent in float, it is divided in float, though it was computed in half.
  const ShardPlan widened{.predivide = 4,
                          .precision = {.master_dtype = at::kFloat, .reduce_dtype = at::kFloat}};
  EXPECT_EQ(reduce({kSmallest, kSmallest}, widened, false, /*is_half=*/true).large, kSmallest);
}

TEST(Predivide, KeepsSumsInRangeWhereTheBackendTakesThemInHalfPrecision) {
  const ShardPlan once{.precision = {.master_dtype = at::kFloat}};
  ShardPlan divided = once;
  divided.predivide = 2;
  EXPECT_TRUE(std::isinf(reduce({40000, 40000}, once, /*on_backend=*/true, true).large));
  EXPECT_EQ(reduce({40000, 40000}, divided, /*on_backend=*/true, true).large, 40000);
  EXPECT_EQ(reduce({40000, 40000}, once, /*on_backend=*/false, true).large, 40000);
}

// The gradients that cat() gives its inputs are views of the one that it gets.
TEST(Predivide, LeavesTensorsOfAutogradAsTheyAre) {
  struct Two : torch::nn::Module {
    torch::Tensor a = register_parameter("a", torch::zeros({40000}));
    torch::Tensor b = register_parameter("b", torch::zeros({40000}));
  };
  run_world(2, [](World&) {
    const auto net = on_test_device(std::make_shared<Two>());
    auto sharded = fully_shard(net, {.level = ShardLevel::kGradients, .predivide = 4});
    const auto gradient = torch::ones({80000}, test_device());
    torch::cat({net->a, net->b}).backward(gradient);
    EXPECT_TRUE(same_values(sharded.full_grad("a"), torch::ones({40000})));
    EXPECT_TRUE(same_values(gradient, torch::ones({80000})));
  });
}

TEST(Predivide, MustBePositiveFiniteAndOfUse) {
  run_world(2, [](World&) {
    const auto refuse = [](const ShardPlan& plan, const std::string& part) {
      expect_error([&] { fully_shard(std::make_shared<Mlp>(8, 1, 3), plan); }, {part});
    };
    for (const double bad : {0., -2., std::numeric_limits<double>::infinity(), std::nan("")})
      refuse({.predivide = bad}, "plan.predivide must be positive and finite; got");
    refuse({.level = ShardLevel::kNone, .predivide = 2, .reduce_gradients = false},
           "bucket_bytes and memory_budget need plan.reduce_gradients");
    refuse({.level = ShardLevel::kNone, .bucket_bytes = 2, .reduce_gradients = false},
           "bucket_bytes and memory_budget need plan.reduce_gradients");
    refuse({.bucket_bytes = -1}, "plan.bucket_bytes must not be negative; got -1");
  });
}

TEST(Predivide, MustBeTheSameOnAllRanks) {
  run_world(2, [](World& world) {
    expect_error(
        [&] { fully_shard(std::make_shared<Mlp>(8, 1, 3), {.predivide = 1.0 + world.rank()}); },
        {"the models and plans must be the same on all ranks", "plan.predivide 1,",
         "plan.predivide 2"});
  });
}

}  // namespace tessera::testing::predivide_test
