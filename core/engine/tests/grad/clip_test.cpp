// Gradients as a whole: their norm, clipping, full_grad, sums in place of means, and refused calls.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "engine/model/sharded_state.h"
#include "support/models.h"

namespace tessera::testing::clip_test {

std::shared_ptr<Mlp> make_mlp() {
  return seeded(7, [] { return std::make_shared<Mlp>(37, 2, 5); });
}

// The plain model with the gradients of all ranks' rows.
std::shared_ptr<Mlp> gradients_alone(int ranks, double scale) {
  auto net = make_mlp();
  for (int rank = 0; rank < ranks; ++rank) {
    (rank_loss(*net, global_batch(0, 12, 37, 5), rank, ranks, 0) * scale).backward();
  }
  return net;
}

// In host memory: the first rank's device may wait for the rank that compares.
std::map<std::string, torch::Tensor> gradients_of(const Mlp& net) {
  std::map<std::string, torch::Tensor> gradients;
  for (const auto& item : net.named_parameters()) gradients[item.key()] = item.value().grad().cpu();
  return gradients;
}

bool close_gradients(const torch::Tensor& a, const torch::Tensor& b) {
  return torch::allclose(a.cpu(), b.cpu(), 1e-5, 1e-7);
}

const std::vector<int> kRanks = {1, 2, 3, 4};
const std::vector<ShardPlan> kPlans = with_each_partition({.unit_bytes = 6000});

TEST(ClipGrad, NormAndClippedGradientsAreThoseOfOneProcess) {
  for (const int ranks : kRanks) {
    for (const double norm_type : {1.0, 2.0, HUGE_VAL}) {
      for (const double max_norm : {0.05, 1000.0}) {
        const auto alone = gradients_alone(ranks, 1.0 / ranks);
        const double expected =
            torch::nn::utils::clip_grad_norm_(alone->parameters(), max_norm, norm_type);
        const auto clipped = gradients_of(*alone);
        on_worlds({ranks}, kPlans, [&](World& world, const ShardPlan& plan) {
          SCOPED_TRACE(fmt::format("norm {}, max {}", norm_type, max_norm));
          auto sharded = fully_shard(make_mlp(), plan);
          rank_loss(*sharded, global_batch(0, 12, 37, 5), world.rank(), world.size(), 0).backward();
          EXPECT_NEAR(sharded.clip_grad_norm_(max_norm, norm_type), expected, 1e-5 * expected);
          for (const auto& [name, gradient] : clipped) {
            EXPECT_TRUE(close_gradients(sharded.full_grad(name), gradient)) << name;
          }
        });
      }
    }
  }
}

TEST(ClipGrad, RanksWithoutAShardTakePart) {
  run_world(4, [&](World& world) {
    for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
      auto sharded = fully_shard(on_test_device(std::make_shared<torch::nn::LinearImpl>(3, 1)),
                                 {.partition = partition});
      sharded.forward(torch::ones({1, 3}, test_device())).sum().backward();
      EXPECT_NEAR(sharded.clip_grad_norm_(100.0), 2.0, 1e-6);
    }
  });
}

TEST(ClipGrad, ANanOnOneRankIsANanOnAll) {
  run_world(3, [&](World& world) {
    for (const double norm_type : {1.0, 2.0, HUGE_VAL}) {
      auto sharded = fully_shard(make_mlp(), {.unit_bytes = 6000});
      auto x = torch::ones({2, 37}, test_device());
      if (world.rank() == 1) x[0][0] = NAN;
      sharded.forward(x).sum().backward();
      EXPECT_TRUE(std::isnan(sharded.clip_grad_norm_(1.0, norm_type))) << norm_type;
    }
  });
}

TEST(ClipGrad, WithoutGradientsTheNormIsZero) {
  run_world(2, [&](World&) {
    auto sharded = fully_shard(make_mlp());
    EXPECT_EQ(sharded.clip_grad_norm_(1.0), 0.0);
    expect_error([&] { sharded.clip_grad_norm_(-1.0); }, {"[clip_grad_norm_]", "-1"});
    expect_error([&] { sharded.clip_grad_norm_(1.0, 0.0); }, {"[clip_grad_norm_]", "norm_type"});
  });
}

TEST(FullGrad, IsTheGradientOfOneProcess) {
  for (const int ranks : kRanks) {
    const auto alone = gradients_of(*gradients_alone(ranks, 1.0 / ranks));
    on_worlds({ranks}, kPlans, [&](World& world, const ShardPlan& plan) {
      auto sharded = fully_shard(make_mlp(), plan);
      EXPECT_FALSE(sharded.full_grad("fc0.weight").defined());
      rank_loss(*sharded, global_batch(0, 12, 37, 5), world.rank(), world.size(), 0).backward();
      for (const auto& item : sharded->named_parameters()) {
        const auto& expected = alone.at(item.key());
        const auto actual = sharded.full_grad(item.value());
        ASSERT_TRUE(actual.defined()) << item.key();
        EXPECT_EQ(actual.sizes(), expected.sizes());
        if (ranks == 3) {
          EXPECT_TRUE(close_gradients(actual, expected)) << item.key();
        } else {
          EXPECT_TRUE(same_values(actual, expected)) << item.key();
        }
      }
    });
  }
  run_world(2, [](World&) {
    auto sharded = fully_shard(make_mlp());
    expect_error([&] { sharded.full_grad("fc7.weight"); }, {"[full_grad]", "fc7.weight"});
    expect_error([&] { sharded.full_grad(torch::ones({2, 3})); }, {"[full_grad]", "[2, 3]"});
  });
}

TEST(FullGrad, IsTheSumIfThePlanDoesNotAverage) {
  for (const int ranks : {1, 2, 4}) {
    const auto alone = gradients_of(*gradients_alone(ranks, 1.0));
    run_world(ranks, [&](World& world) {
      for (const auto level : {ShardLevel::kNone, ShardLevel::kParameters}) {
        auto sharded = fully_shard(make_mlp(), {.level = level, .average = false});
        rank_loss(*sharded, global_batch(0, 12, 37, 5), world.rank(), world.size(), 0).backward();
        EXPECT_TRUE(same_values(sharded.full_grad("fc1.weight"), alone.at("fc1.weight")));
      }
    });
  }
}

TEST(RefusedGradients, SparseOnesNameTheParameter) {
  TESSERA_ON_HOST_ONLY("the simulated device has no sparse tensors");
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World&) {
      auto embedding = on_test_device(std::make_shared<torch::nn::EmbeddingImpl>(
          torch::nn::EmbeddingOptions(10, 4).sparse(true)));
      auto sharded = fully_shard(embedding);
      const auto loss = sharded.forward(on_test_device(torch::tensor({1, 2}))).sum();
      expect_error([&] { loss.backward(); }, {"weight", "dense", "sparse"});
    });
  }
}

TEST(RefusedGradients, OnesWithAGraphNameTheParameter) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World&) {
      auto sharded = fully_shard(make_mlp());
      const auto loss = sharded.forward(torch::ones({2, 37}, test_device())).square().sum();
      expect_error([&] { loss.backward({}, std::nullopt, /*create_graph=*/true); },
                   {"create_graph"});
      // The model is usable afterwards.
      sharded.zero_grad();
      sharded.forward(torch::ones({2, 37}, test_device())).square().sum().backward();
      EXPECT_TRUE(sharded.full_grad("fc0.weight").defined());
    });
  }
}

}  // namespace tessera::testing::clip_test
