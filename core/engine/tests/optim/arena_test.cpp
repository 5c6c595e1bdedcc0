// Sharded training where ranks share memory.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "support/models.h"
#include "support/sharded_job.h"

namespace tessera::testing::arena_test {

constexpr ShardLevel kSharedLevels[] = {ShardLevel::kOptimizerState, ShardLevel::kGradients,
                                        ShardLevel::kParameters};

std::shared_ptr<Mlp> make_net() {
  return seeded(7, [] { return std::make_shared<Mlp>(); });
}

// The access that the mapping of `address` allows, as in /proc/self/maps: "r--s".
std::string access_to(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string access;
    std::istringstream(line) >> std::hex >> begin >> dash >> end >> access;
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (begin <= at && at < end) return access;
  }
  return "unmapped";
}

TEST(ArenaTraining, HasTheBitsOfGloo) {
  const auto train = [](World& world) {
    std::vector<State> states;
    for (const ShardPlan& plan : at_each_level({.unit_bytes = 4000}))
      states.push_back(train_sharded(sgd_run<Mlp>(), world, plan));
    return states;
  };
  for (const int ranks : {2, 3, 4}) {
    const auto arena = results_of(ranks, train, Transport::kArena)[1];
    const auto gloo = results_of(ranks, train, Transport::kGloo)[1];
    for (size_t i = 0; i < gloo.size(); ++i)
      expect_same_state(arena[i], gloo[i], 0, std::to_string(ranks) + " ranks");
  }
}

TEST(ArenaTraining, MixedPrecisionOffloadAndReplicasWorkInSharedMemory) {
  const auto train = [](World& world) {
    const auto groups = world.hybrid_process_groups(2);
    return train_sharded(sgd_run<Mlp>(), world,
                         {.unit_bytes = 4000,
                          .process_group = groups.shard,
                          .replicate_group = groups.replicate,
                          .precision = {.reduce_dtype = torch::kBFloat16},
                          .offload = Offload::kHost});
  };
  expect_same_state(results_of(4, train, Transport::kArena)[3],
                    results_of(4, train, Transport::kGloo)[3], 0,
                    "bfloat16 messages, offloaded, 2 x 2");
}

TEST(ArenaTraining, KeepsOneCopyOfTheParametersForAllRanks) {
  TESSERA_ON_HOST_ONLY("parameters in shared memory");
  for (const auto level : kSharedLevels) {
    std::vector<const void*> places(3);
    run_arena(3, [&](World& world) {
      auto net = make_net();
      int64_t nbytes = 0;
      for (const auto& parameter : net->parameters()) nbytes += parameter.nbytes();
      auto sharded = fully_shard(net, {.level = level});
      const auto keep = sharded.keep_unsharded();
      places[world.rank()] = net->fcs[0]->weight.data_ptr();
      // Padding to shards of whole cache lines.
      EXPECT_LE(sharded.memory().parameters, nbytes / 3 + 20 * 64);
      EXPECT_EQ(sharded.memory().peak_unsharded, 0);
      world.process_group()->barrier({"test"});
    });
    EXPECT_EQ(places[0], places[1]);
    EXPECT_EQ(places[0], places[2]);
  }
}

TEST(ArenaTraining, UserCodeCanOnlyReadTheParameters) {
  TESSERA_ON_HOST_ONLY("parameters in shared memory");
  run_arena(2, [](World& world) {
    auto net = make_net();
    auto sharded = fully_shard(net);
    const auto keep = sharded.keep_unsharded();
    EXPECT_EQ(access_to(net->fcs[1]->weight.data_ptr()), "r--s");
    world.process_group()->barrier({"test"});
  });
}

// Each rank does the same write; in shared memory it must not be done twice.
TEST(ArenaTraining, OperatorsThatWriteDoItOnce) {
  const auto write = [](Mlp& net) {
    torch::NoGradGuard no_grad;
    for (int i = 0; i < 3; ++i) {
      for (auto& parameter : net.parameters()) parameter.mul_(2).add_(1);
    }
  };
  const auto plain = make_net();
  write(*plain);
  const auto expected = plain_state(*plain);
  const auto bias = plain->head->bias.detach().cpu();
  run_arena(3, [&](World&) {
    for (const ShardPlan& plan : at_each_level({.unit_bytes = 3000})) {
      auto net = make_net();
      auto sharded = fully_shard(net, plan);
      write(*net);
      expect_same_state(sharded.full_state(), expected, 0, "written to three times");
      EXPECT_TRUE(same_values(net->head->bias * 1, bias));
    }
  });
}

TEST(ArenaTraining, AnOperatorThatFailsToWriteChangesNothing) {
  run_arena(2, [](World&) {
    auto net = make_net();
    const auto before = net->head->weight.clone();
    auto sharded = fully_shard(net);
    torch::NoGradGuard no_grad;
    EXPECT_THROW(net->head->weight.copy_(torch::ones({7, 11, 13})), c10::Error);
    EXPECT_TRUE(torch::equal(net->head->weight * 1, before));
    net->head->weight.zero_();
    EXPECT_EQ((net->head->weight * 1).abs().sum().item<float>(), 0);
  });
}

// One rank evaluates between backward and step, while the other is ready to step.
TEST(ArenaTraining, ARankThatStillReadsIsWaitedFor) {
  TESSERA_ON_HOST_ONLY("ranks that share no memory wait for one another in a gather");
  run_arena(2, [](World& world) {
    ShardedJob<Mlp> job(run_by<Mlp, torch::optim::SGD>(torch::optim::SGDOptions(1000)), world);
    const auto x = torch::ones({4, 37});
    const auto before = job.sharded.forward(x).detach().clone();
    job.sharded.forward(x).sum().backward();
    if (world.rank() == 1) {
      torch::NoGradGuard no_grad;
      for (int i = 0; i < 20; ++i) EXPECT_TRUE(torch::equal(job.sharded.forward(x), before)) << i;
    }
    job.optimizer.step();
    torch::NoGradGuard no_grad;
    EXPECT_FALSE(torch::equal(job.sharded.forward(x), before));
  });
}

}  // namespace tessera::testing::arena_test
