// Sharded training on several hosts whose ranks share memory.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "engine/model/sharded_state.h"
#include "support/models.h"
#include "support/resident_pages.h"
#include "support/run_world.h"

namespace tessera {
namespace hosts_test {

using namespace testing;

TEST(TrainingOnHosts, GivesTheResultOfOneProcess) {
  const TrainingRun run = sgd_run<Mlp>();
  const auto expected = train_alone(run, 4);
  for (const auto& host_of : {by_halves, by_turns}) {
    for (const auto level : kAllLevels) {
      for (const int64_t unit_bytes : {0, 1 << 24}) {
        const auto what =
            fmt::format("level {}, units of {} bytes", static_cast<int>(level), unit_bytes);
        std::vector<std::vector<NamedTensor>> states(4);
        run_hosts(4, host_of, [&](World& world) {
          states[world.rank()] =
              train_sharded(run, world, {.level = level, .unit_bytes = unit_bytes});
        });
        expect_same_state(states[0], expected, 2e-6, what);
        for (const auto& state : states)
          expect_same_state(state, states[0], 0, what + ", replicas");
      }
    }
  }
}

TEST(TrainingOnHosts, TakesMasterWeightsOffloadAndLimits) {
  const TrainingRun run = sgd_run<Mlp>();
  const auto expected = train_alone(run, 4);
  std::vector<ShardPlan> plans(3, {.unit_bytes = 6000});
  plans[0].precision.master_dtype = plans[0].precision.reduce_dtype = torch::kDouble;
  plans[1].offload = Offload::kHost;
  plans[2].resident_bytes = -1;
  for (size_t i = 0; i < plans.size(); ++i) {
    std::vector<std::vector<NamedTensor>> states(4);
    run_hosts(4, by_halves,
              [&](World& world) { states[world.rank()] = train_sharded(run, world, plans[i]); });
    expect_same_state(states[0], expected, 2e-6, fmt::format("plan {}", i));
    for (const auto& state : states) expect_same_state(state, states[0], 0, "replicas");
  }
}

// A host keeps its own ranks' shards, and whole units only while they are used.
TEST(TrainingOnHosts, FreesWhatOtherHostsOwn) {
  TESSERA_ON_HOST_ONLY("parameters in shared memory");
  run_hosts(4, by_halves, [](World& world) {
    auto net = seeded(7, [] { return std::make_shared<Mlp>(512, 4, 5); });
    torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
    auto sharded = fully_shard(net, {.unit_bytes = 0});
    ShardedOptimizer optimizer(sharded, inner);
    auto& pg = *world.process_group();
    for (int step = 0; step < 3; ++step) {
      const Batch batch = global_batch(step, 12, 512, 5);
      optimizer.zero_grad();
      rank_loss(*net, batch, world.rank(), world.size(), step).backward();
      pg.barrier({"test", Channel::kControl});
      int64_t whole = 0, resident = 0;
      for (const auto& unit : sharded.state()->units()) {
        EXPECT_TRUE(unit->is_shared());
        EXPECT_TRUE(unit->frees());
        EXPECT_EQ(unit->state(), Unit::State::kSharded);
        whole += unit->layout().nbytes();
        resident += kPage * resident_pages(unit->full());
      }
      const auto units = static_cast<int64_t>(sharded.state()->units().size());
      EXPECT_LE(resident, whole / 2 + 2 * 4096 * units) << "of " << whole;
      pg.barrier({"test", Channel::kControl});
      optimizer.step();
    }
    EXPECT_LT(sharded.memory().peak_unsharded, 4 * 512 * 512 * 4);
  });
}

TEST(TrainingOnHosts, OperatorsMayWriteParametersInPlace) {
  run_hosts(4, by_turns, [](World& world) {
    auto net = seeded(7, [] { return std::make_shared<Mlp>(); });
    auto sharded = fully_shard(net, {.unit_bytes = 6000});
    const auto before = sharded.full_state();
    {
      torch::NoGradGuard no_grad;
      for (auto& param : net->parameters()) param.mul_(2).add_(1);
    }
    const auto after = sharded.full_state();
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(torch::equal(after[i].tensor, before[i].tensor * 2 + 1)) << before[i].name;
  });
}

TEST(TrainingOnHosts, SendsAShardOncePerHost) {
  TESSERA_ON_HOST_ONLY("the backends of devices see to hosts themselves");
  run_hosts(4, by_halves, [](World& world) {
    const auto counter = counting_process_group(world.process_group());
    auto net = seeded(3, [] { return std::make_shared<Mlp>(37, 4, 5); });
    torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
    auto sharded = fully_shard(net, {.unit_bytes = 6000, .process_group = counter});
    ShardedOptimizer optimizer(sharded, inner);
    int64_t shards = 0;
    for (const auto& unit : sharded.state()->units())
      shards += unit->layout().shard_numel(world.rank()) * 4;
    for (int step = 0; step < 4; ++step) {
      const Batch batch = global_batch(step, 12, 37, 5);
      optimizer.zero_grad();
      rank_loss(*net, batch, world.rank(), world.size(), step).backward();
      optimizer.step();
      if (step == 2) counter->reset_counts();
    }
    // Gathers in forward and in backward; the unit at the turn between them is gathered once.
    EXPECT_GT(counter->counts().all_gather.bytes_sent, shards);
    EXPECT_LE(counter->counts().all_gather.bytes_sent, 2 * shards);
    EXPECT_LE(counter->counts().reduce_scatter.bytes_sent, 2 * shards);
  });
}

// ZeRO++'s secondary shards (hpZ): with `resident_bytes` a host keeps the parameters whole from
// forward to backward, in one copy that its ranks share, and no gather of backward leaves it.
TEST(TrainingOnHosts, ParametersThatStayOnTheHostAreSentOnceAStep) {
  TESSERA_ON_HOST_ONLY("parameters in shared memory");
  for (const int64_t resident_bytes : {0, -1}) {
    run_hosts(4, by_halves, [&](World& world) {
      const auto counter = counting_process_group(world.process_group());
      auto net = seeded(3, [] { return std::make_shared<Mlp>(37, 4, 5); });
      torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
      auto sharded = fully_shard(
          net, {.unit_bytes = 0, .resident_bytes = resident_bytes, .process_group = counter});
      ShardedOptimizer optimizer(sharded, inner);
      // To the one other host.
      int64_t shards = 0;
      for (const auto& unit : sharded.state()->units())
        shards += unit->layout().shard_numel(world.rank()) * 4;
      const Batch batch = global_batch(0, 12, 37, 5);
      const auto loss = [&] { return rank_loss(*net, batch, world.rank(), world.size(), 0); };
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        loss().backward();
        optimizer.step();
      }
      optimizer.zero_grad();
      counter->reset_counts();
      const auto forward = loss();
      const int64_t in_forward = counter->counts().all_gather.bytes_sent;
      forward.backward();
      const int64_t in_backward = counter->counts().all_gather.bytes_sent - in_forward;
      if (resident_bytes < 0) {
        EXPECT_LE(in_forward, shards);
        EXPECT_EQ(in_backward, 0);
      } else {
        EXPECT_GT(in_backward, shards / 2);
      }
    });
  }
}

}  // namespace hosts_test
}  // namespace tessera
