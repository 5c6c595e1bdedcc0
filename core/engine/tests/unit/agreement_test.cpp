// Checks that all ranks share: equal models, and errors of one rank on all. And the pool of unit
// buffers.
#include "engine/unit/agreement.h"

#include <gtest/gtest.h>

#include "support/models.h"

namespace tessera::testing::agreement_test {

TEST(Agreement, ModelsThatDifferNameTheFirstParameterAndTheRanks) {
  run_world(4, [](World& world) {
    const int64_t out = world.rank() == 1 || world.rank() == 3 ? 6 : 5;
    const auto net = std::make_shared<Mlp>(8, 2, out);
    const auto before = plain_state(*net);
    expect_error([&] { fully_shard(net); }, {"[fully_shard]", "'head.weight'", "rank 0 has",
                                             "[5, 8]", "ranks 1, 3 have", "[6, 8]"});
    expect_same_state(plain_state(*net), before, 0, "unchanged");
    net->fcs[0]->weight.data_ptr<float>();
    fully_shard(std::make_shared<Mlp>(8, 2, 5));  // the world still works
  });
}

TEST(Agreement, AMissingParameterADtypeFrozennessAndStridesAreDifferences) {
  run_world(2, [](World& world) {
    const bool other = world.rank() == 1;
    expect_error([&] { fully_shard(std::make_shared<Mlp>(8, other ? 1 : 2, 5)); },
                 {"rank 0 has 'fc1.weight'", "rank 1 has 'norm.weight'"});
    const auto dtype = std::make_shared<Mlp>(8, 1, 5);
    if (other) dtype->head->to(torch::kDouble);
    expect_error([&] { fully_shard(dtype); }, {"'head.weight' Float", "Double"});
    const auto frozen = std::make_shared<Mlp>(8, 1, 5);
    if (other) frozen->norm->weight.requires_grad_(false);
    expect_error([&] { fully_shard(frozen); }, {"'norm.weight'", "frozen"});
    const auto strides = std::make_shared<Mlp>(8, 1, 5);
    if (other) strides->head->weight.set_data(torch::zeros({8, 5}).t());
    expect_error([&] { fully_shard(strides); }, {"'head.weight'", "[8, 1]", "[1, 5]"});
    const auto extra = std::make_shared<Mlp>(8, 1, 5);
    if (other) extra->register_parameter("more", torch::zeros({2}));
    expect_error([&] { fully_shard(extra); }, {"'more'", "'fc0.weight'"});
  });
}

TEST(Agreement, PlansThatDifferAreShown) {
  run_world(3, [](World& world) {
    const auto net = std::make_shared<Mlp>(8, 1, 5);
    expect_error([&] { fully_shard(net, {.prefetch = world.rank() == 2 ? 3 : 1}); },
                 {"[fully_shard]", "rank 0 has plan.prefetch 1", "rank 2 has plan.prefetch 3"});
    const auto level = world.rank() == 1 ? ShardLevel::kGradients : ShardLevel::kNone;
    expect_error([&] { fully_shard(net, {.level = level}); },
                 {"rank 0 has plan.level kNone", "rank 1 has plan.level kGradients"});
  });
}

TEST(Agreement, BadInputOfOneRankIsAnErrorOnAllWithItsRank) {
  run_world(3, [](World& world) {
    const auto net = std::make_shared<Mlp>(8, 1, 5);
    const ShardPlan plan{.unit_bytes = world.rank() == 1 ? -4 : 4};
    expect_error([&] { fully_shard(net, plan); }, {"[fully_shard]", "unit_bytes", "-4"});
    if (world.rank() != 1) {
      expect_error([&] { fully_shard(net, plan); }, {"rank 1 of 3"});
    } else {
      expect_error([&] { fully_shard(net, plan); }, {"negative"});
    }
  });
}

TEST(Agreement, NegativeSizesAndEmptyModelsAreRefusedEverywhere) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto net = std::make_shared<Mlp>(8, 1, 5);
      expect_error([&] { fully_shard(net, {.unit_bytes = -1}); }, {"plan.unit_bytes", "-1"});
      expect_error([&] { fully_shard(net, {.whole_numel = -2}); }, {"plan.whole_numel", "-2"});
      expect_error([&] { fully_shard(net, {.resident_bytes = -3}); },
                   {"plan.resident_bytes", "-3"});
      expect_error([&] { fully_shard(net, {.prefetch = -4}); }, {"plan.prefetch", "-4"});
      expect_error(
          [&] {
            fully_shard(net, {.owners = {{"head.weight", 0}}});
          },
          {"plan.owners", "kWholeParam"});
      expect_error([&] { fully_shard(net, {.units = {{"fc9.weight"}}}); },
                   {"plan.units", "fc9.weight"});
      expect_error([&] { fully_shard(net, {.whole = {"fc9.weight"}}); },
                   {"plan.whole", "fc9.weight"});
      expect_error([&] { fully_shard(std::make_shared<torch::nn::ReLUImpl>()); },
                   {"must have parameters"});
      net->fcs[0]->weight.data_ptr<float>();
    });
  }
}

TEST(Agreement, StartValuesAreThoseOfRankZero) {
  for (const int ranks : {2, 3}) {
    run_world(ranks, [](World& world) {
      const auto make = [] { return std::make_shared<Mlp>(8, 2, 5); };
      const auto expected = plain_state(*seeded(1, make));
      auto sharded = fully_shard(seeded(1 + world.rank(), make));
      expect_same_state(sharded.full_state(), expected, 0, "broadcast");
    });
  }
}

}  // namespace tessera::testing::agreement_test
