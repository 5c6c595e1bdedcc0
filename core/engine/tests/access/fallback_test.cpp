// Operators on parameters of two sharded models.
#include <gtest/gtest.h>

#include "support/models.h"

namespace tessera::testing::fallback_test {

// `second` has more units than `first`, and parameters of all the shapes of `first`.
struct Pair {
  std::shared_ptr<Mlp> first = seeded(7, [] { return std::make_shared<Mlp>(37, 1, 5); });
  std::shared_ptr<Mlp> second = seeded(8, [] { return std::make_shared<Mlp>(37, 4, 5); });

  torch::Tensor loss(const torch::Tensor& x) const {
    namespace F = torch::nn::functional;
    auto y = torch::gelu(
        F::linear(x, first->fcs[0]->weight + second->fcs[3]->weight, first->fcs[0]->bias));
    y = second->forward(y) + F::linear(y, first->head->weight, second->head->bias);
    return y.square().mean();
  }
};

void on_sizes(const std::function<void(World&, const ShardPlan&)>& f) {
  on_worlds({1, 2, 3}, at_each_level({.unit_bytes = 6000}), f);
}

TEST(TwoShardedModels, MayBeUsedByOneOperator) {
  on_sizes([](World&, const ShardPlan& plan) {
    const Pair plain, pair;
    const auto first = fully_shard(pair.first, plan);
    const auto second = fully_shard(pair.second, plan);
    for (int i = 0; i < 2; ++i) {
      for (size_t last = 0; last < 4; ++last) {
        const auto sum = [&](const Pair& p) {
          return p.second->fcs[last]->weight + p.first->fcs[0]->weight;
        };
        EXPECT_TRUE(torch::equal(sum(pair), sum(plain)));
      }
      const auto all = [](const Pair& p) {
        auto tensors = p.second->parameters();
        for (const auto& parameter : p.first->parameters()) tensors.push_back(parameter);
        return torch::stack(torch::_foreach_norm(tensors, 2));
      };
      EXPECT_TRUE(torch::equal(all(pair), all(plain)));
    }
  });
}

TEST(TwoShardedModels, MayBeWrittenByOneOperator) {
  on_sizes([](World&, const ShardPlan& plan) {
    const Pair plain, pair;
    const auto write = [](const Pair& p) {
      torch::NoGradGuard no_grad;
      // An average of weights, in place.
      p.second->fcs[2]->weight.mul_(0.9).add_(p.first->fcs[0]->weight, 0.1);
      p.first->head->weight.copy_(p.second->head->weight);
      torch::_foreach_mul_(
          std::vector<torch::Tensor>{p.second->fcs[3]->weight, p.first->fcs[0]->bias}, 3);
    };
    auto first = fully_shard(pair.first, plan);
    auto second = fully_shard(pair.second, plan);
    write(plain);
    write(pair);
    expect_same_state(first.full_state(), plain_state(*plain.first), 0, "first");
    expect_same_state(second.full_state(), plain_state(*plain.second), 0, "second");
  });
}

TEST(TwoShardedModels, TrainTogetherAsInOneProcess) {
  on_sizes([](World& world, const ShardPlan& plan) {
    const Pair plain, pair;
    auto first = fully_shard(pair.first, plan);
    auto second = fully_shard(pair.second, plan);
    const auto sgd = [](Mlp& net) { return torch::optim::SGD(net.parameters(), 0.1); };
    auto plain_first = sgd(*plain.first), plain_second = sgd(*plain.second);
    auto inner_first = sgd(*pair.first), inner_second = sgd(*pair.second);
    ShardedOptimizer optimizer_first(first, inner_first), optimizer_second(second, inner_second);
    for (int step = 0; step < 3; ++step) {
      const auto x = global_batch(step, 12, 37, 5).x;
      plain_first.zero_grad();
      plain_second.zero_grad();
      for (int rank = 0; rank < world.size(); ++rank)
        (plain.loss(rows_of(x, rank, world.size())) / world.size()).backward();
      plain_first.step();
      plain_second.step();
      optimizer_first.zero_grad();
      optimizer_second.zero_grad();
      pair.loss(rows_of(x, world.rank(), world.size())).backward();
      optimizer_first.step();
      optimizer_second.step();
    }
    expect_same_state(first.full_state(), plain_state(*plain.first), 2e-6, "first");
    expect_same_state(second.full_state(), plain_state(*plain.second), 2e-6, "second");
  });
}

TEST(AShardedModelInsideAnother, IsRefusedWithItsNameAlsoIfThePlanIgnoresIt) {
  on_sizes([](World&, const ShardPlan& plan) {
    const auto net = on_test_device(std::make_shared<Mlp>(37, 2, 5));
    fully_shard(net->head, plan);
    expect_error([&] { fully_shard(net, plan); }, {"[fully_shard]", "'head.weight'", "sharded"});
    ShardPlan ignoring = plan;
    ignoring.ignored = {"head.weight", "head.bias"};
    expect_error([&] { fully_shard(net, ignoring); },
                 {"[fully_shard]", "'head.weight'", "sharded"});
  });
}

}  // namespace tessera::testing::fallback_test
