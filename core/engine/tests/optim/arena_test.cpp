// Sharded training where ranks share memory.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace arena_test {

using namespace testing;

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

std::vector<NamedTensor> train(const TrainingRun& run, World& world, ShardLevel level) {
  return train_sharded(run, world, {.level = level, .unit_bytes = 4000});
}

TEST(ArenaTraining, HasTheBitsOfGloo) {
  const auto run = sgd_run<Mlp>();
  for (const int ranks : {2, 3, 4}) {
    for (const auto level : kAllLevels) {
      std::vector<NamedTensor> arena, gloo;
      run_arena(ranks, [&](World& world) {
        auto state = train(run, world, level);
        if (world.rank() == 1) arena = state;
      });
      run_world(
          ranks,
          [&](World& world) {
            auto state = train(run, world, level);
            if (world.rank() == 1) gloo = state;
          },
          std::chrono::seconds(30), Transport::kGloo);
      expect_same_state(arena, gloo, 0, std::to_string(ranks) + " ranks");
    }
  }
}

TEST(ArenaTraining, MixedPrecisionOffloadAndReplicasWorkInSharedMemory) {
  const auto run = sgd_run<Mlp>();
  std::vector<NamedTensor> arena, gloo;
  for (const auto transport : {Transport::kArena, Transport::kGloo}) {
    run_world(
        4,
        [&](World& world) {
          const auto groups = world.hybrid_process_groups(2);
          ShardPlan plan{.unit_bytes = 4000,
                         .process_group = groups.shard,
                         .replicate_group = groups.replicate,
                         .precision = {.reduce_dtype = torch::kBFloat16},
                         .offload = Offload::kHost};
          auto state = train_sharded(run, world, plan);
          if (world.rank() == 3) (transport == Transport::kArena ? arena : gloo) = state;
        },
        std::chrono::seconds(30), transport);
  }
  expect_same_state(arena, gloo, 0, "bfloat16 messages, offloaded, 2 x 2");
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
  for (const auto level : kAllLevels) {
    run_arena(3, [&](World&) {
      auto net = make_net();
      auto sharded = fully_shard(net, {.level = level, .unit_bytes = 3000});
      write(*net);
      expect_same_state(sharded.full_state(), expected, 0, "written to three times");
      EXPECT_TRUE(same_values(net->head->bias * 1, bias));
    });
  }
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
    auto net = make_net();
    torch::optim::SGD inner(net->parameters(), 1000.0);
    auto sharded = fully_shard(net);
    ShardedOptimizer optimizer(sharded, inner);
    const auto x = torch::ones({4, 37});
    const auto before = sharded.forward(x).detach().clone();
    sharded.forward(x).sum().backward();
    if (world.rank() == 1) {
      torch::NoGradGuard no_grad;
      for (int i = 0; i < 20; ++i) EXPECT_TRUE(torch::equal(sharded.forward(x), before)) << i;
    }
    optimizer.step();
    torch::NoGradGuard no_grad;
    EXPECT_FALSE(torch::equal(sharded.forward(x), before));
  });
}

}  // namespace arena_test
}  // namespace tessera
