// State of a module before it is sharded: gradients, and other tensors in the memory of its
// parameters.
#include "engine/model/sharded_state.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/models.h"

namespace tessera::testing::sharded_state_test {

std::shared_ptr<Mlp> make_mlp() {
  return seeded(7, [] { return std::make_shared<Mlp>(37, 2, 5); });
}

void backward(Mlp& net, World& world, int step) {
  rank_loss(net, global_batch(step, 12, 37, 5), world.rank(), world.size(), step).backward();
}

void on_sizes(const std::function<void(World&, const ShardPlan&)>& f) {
  on_worlds({1, 2, 3}, at_each_level({.unit_bytes = 6000}), f);
}

// The state of one process after backwards on these batches and a step.
std::vector<NamedTensor> stepped_alone(const std::vector<int>& batches, int size) {
  const auto net = make_mlp();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (const int batch : batches) {
    for (int rank = 0; rank < size; ++rank) {
      (rank_loss(*net, global_batch(batch, 12, 37, 5), rank, size, batch) / size).backward();
    }
  }
  optimizer.step();
  return plain_state(*net);
}

TEST(GradientsAtTheWrap, CountAsThoseOfABackwardUnderNoSync) {
  on_sizes([](World& world, const ShardPlan& plan) {
    const auto net = make_mlp();
    backward(*net, world, 0);
    auto sharded = fully_shard(net, plan);
    torch::optim::SGD inner(net->parameters(), 0.1);
    ShardedOptimizer optimizer(sharded, inner);
    expect_error([&] { optimizer.step(); }, {"[step]", "no_sync"});
    backward(*net, world, 1);
    optimizer.step();
    expect_same_state(sharded.full_state(), stepped_alone({0, 1}, world.size()), 2e-6,
                      "two batches");
  });
}

TEST(GradientsAtTheWrap, AreReducedByReduceAndForgottenByZeroGrad) {
  on_sizes([](World& world, const ShardPlan& plan) {
    for (const bool clears : {false, true}) {
      const auto net = make_mlp();
      backward(*net, world, 0);
      auto sharded = fully_shard(net, plan);
      torch::optim::SGD inner(net->parameters(), 0.1);
      ShardedOptimizer optimizer(sharded, inner);
      if (clears) {
        optimizer.zero_grad();
        backward(*net, world, 1);
      } else {
        sharded.reduce();
      }
      optimizer.step();
      expect_same_state(sharded.full_state(), stepped_alone({clears ? 1 : 0}, world.size()), 2e-6,
                        clears ? "cleared" : "reduced");
    }
  });
}

TEST(GradientsAtTheWrap, OfSomeParametersOnSomeRanksAreKept) {
  on_sizes([](World& world, const ShardPlan& plan) {
    const auto net = make_mlp();
    if (world.rank() == 0) net->head->weight.sum().backward();
    auto sharded = fully_shard(net, plan);
    sharded.reduce();
    EXPECT_FALSE(sharded.full_grad("fc0.weight").defined());
    const auto gradient = sharded.full_grad("head.weight");
    EXPECT_TRUE(torch::allclose(gradient, torch::full_like(gradient, 1. / world.size())));
  });
}

TEST(GradientsAtTheWrap, ThatCantBeKeptAreRefusedOnAllRanks) {
  on_sizes([](World& world, const ShardPlan& plan) {
    const auto last = world.size() - 1;
    const std::vector<std::function<torch::Tensor()>> gradients = {
        [] {
          return torch::ones({5, 37}).to_sparse();
        },
        [] {
          return torch::ones({5, 37}).requires_grad_();
        },
        [] { return torch::ones({37}); }};
    for (const auto& gradient : gradients) {
      const auto net = make_mlp();
      if (world.rank() == last) net->head->weight.mutable_grad() = gradient();
      expect_error([&] { fully_shard(net, plan); }, {"[fully_shard]", "head.weight", "gradient"});
      EXPECT_EQ(net->head->weight.grad().defined(), world.rank() == last);
      net->zero_grad();
      EXPECT_NO_THROW(fully_shard(net, plan));
    }
  });
}

// A perceptron with one more tensor in the memory of a parameter, on the last rank only.
struct Aliasing : Net {
  Aliasing(bool aliases, const std::function<torch::Tensor(const torch::Tensor&)>& alias,
           bool is_parameter) {
    fc = register_module("fc", torch::nn::Linear(37, 37));
    const auto other = aliases ? alias(fc->weight) : alias(fc->weight.detach().clone());
    is_parameter ? register_parameter("other", other, /*requires_grad=*/false)
                 : register_buffer("other", other);
  }
  torch::Tensor forward(torch::Tensor x) override { return fc->forward(x); }
  torch::nn::Linear fc{nullptr};
};

TEST(TensorsInAParametersMemory, AreRefusedOnAllRanksWithBothNames) {
  const std::vector<std::function<torch::Tensor(const torch::Tensor&)>> aliases = {
      [](const auto& weight) { return weight.detach(); },
      [](const auto& weight) { return weight.detach().t(); },
      [](const auto& weight) { return weight.detach().select(0, 3); },
      [](const auto& weight) { return weight.detach().view(torch::kInt); },
      [](const auto& weight) {
        return torch::from_blob(weight.data_ptr(), {37}, [keep = weight.detach()](void*) {});
      }};
  on_sizes([&](World& world, const ShardPlan& plan) {
    for (size_t i = 0; i < aliases.size(); ++i) {
      for (const bool is_ignored : {false, true}) {
        SCOPED_TRACE(fmt::format("alias {}, ignored {}", i, is_ignored));
        const bool mine = world.rank() == world.size() - 1;
        const auto net = std::make_shared<Aliasing>(mine, aliases[i], is_ignored);
        ShardPlan ignoring = plan;
        if (is_ignored) ignoring.ignored = {"other"};
        const void* const memory = net->fc->weight.data_ptr();
        expect_error([&] { fully_shard(net, ignoring); },
                     {"[fully_shard]", "'other'", "'fc.weight'", "memory"});
        EXPECT_EQ(net->fc->weight.data_ptr(), memory);
        const auto apart = std::make_shared<Aliasing>(false, aliases[i], is_ignored);
        EXPECT_NO_THROW(fully_shard(apart, ignoring));
      }
    }
  });
}

TEST(TensorsInAParametersMemory, ThatAreViewsOfAShardedModelAreRefused) {
  on_sizes([](World&, const ShardPlan& plan) {
    const auto inner = make_mlp();
    fully_shard(inner, plan);
    const auto net = make_mlp();
    net->register_buffer("view", inner->head->weight.detach());
    expect_error([&] { fully_shard(net, plan); }, {"[fully_shard]", "'view'", "sharded"});
  });
}

TEST(ParametersInOneMemory, OfTwoDtypesAreRefused) {
  on_sizes([](World&, const ShardPlan& plan) {
    // Counted in elements, one begins where the other ends.
    const auto net = make_mlp();
    const auto bytes = torch::zeros({400}, torch::kByte);
    net->register_parameter("wide", bytes.narrow(0, 0, 200).view(torch::kFloat), false);
    net->register_parameter("narrow", bytes.narrow(0, 100, 200), false);
    expect_error([&] { fully_shard(net, plan); }, {"'wide'", "'narrow'", "overlap"});
  });
}

TEST(ParametersInOneMemory, ThatDoNotOverlapAreKept) {
  on_sizes([](World& world, const ShardPlan& plan) {
    const auto build = [] {
      const auto net = make_mlp();
      const auto packed = on_test_device(torch::arange(37. * 37 + 37).to(torch::kFloat).mul_(1e-4));
      net->fcs[0]->weight.set_data(packed.narrow(0, 37, 37 * 37).view({37, 37}));
      net->fcs[0]->bias.set_data(packed.narrow(0, 0, 37));
      return net;
    };
    const auto plain = build();
    auto sharded = fully_shard(build(), plan);
    expect_same_state(sharded.full_state(), plain_state(*plain), 0, "packed");
    backward(*sharded, world, 0);
    EXPECT_TRUE(sharded.full_grad("fc0.bias").defined());
  });
}

// Statistics of batch norms are each rank's own, unless the plan synchronizes buffers.
TEST(LoadFullState, TakesTheBuffersOfEachRank) {
  on_sizes([](World& world, const ShardPlan& plan) {
    torch::nn::Sequential net(torch::nn::Linear(37, 5), torch::nn::BatchNorm1d(5));
    on_test_device(net);
    auto sharded = fully_shard(net.ptr(), plan);
    const auto use = [&](int step) {
      net->forward(rows_of(global_batch(step, 12, 37, 5).x, world.rank(), world.size()))
          .sum()
          .backward();
    };
    use(0);
    const auto state = sharded.full_state();
    use(1);
    sharded.load_full_state(state);
    expect_same_state(sharded.full_state(), state, 0, "own buffers");
  });
}

TEST(AParameterThatAnOperatorMade, IsRefusedWithItsName) {
  on_sizes([](World&, const ShardPlan& plan) {
    const auto net = make_mlp();
    const auto base = torch::ones({37}, torch::requires_grad());
    net->register_parameter("made", 2 * base);
    expect_error([&] { fully_shard(net, plan); }, {"[fully_shard]", "'made'", "leaf"});
  });
}

}  // namespace tessera::testing::sharded_state_test
