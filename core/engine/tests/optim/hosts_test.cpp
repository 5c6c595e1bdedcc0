// Sharded training on several hosts whose ranks share memory.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/counted_job.h"
#include "support/resident_pages.h"

namespace tessera::testing::hosts_test {

// Expects of each plan the result of one process, and the same on all ranks.
void expect_parity_on_hosts(const std::function<int(int)>& host_of,
                            const std::vector<ShardPlan>& plans) {
  const TrainingRun run = sgd_run<Mlp>();
  const State expected = train_alone(run, 4);
  std::vector<std::vector<State>> states(plans.size(), std::vector<State>(4));
  run_hosts(4, host_of, [&](World& world) {
    for (size_t i = 0; i < plans.size(); ++i)
      states[i][world.rank()] = train_sharded(run, world, plans[i]);
  });
  for (size_t i = 0; i < plans.size(); ++i)
    expect_same_states(states[i], expected, 2e-6, describe(4, plans[i]));
}

TEST(TrainingOnHosts, GivesTheResultOfOneProcess) {
  for (const auto& host_of : {by_halves, by_turns}) {
    for (const int64_t unit_bytes : {0, 1 << 24})
      expect_parity_on_hosts(host_of, at_each_level({.unit_bytes = unit_bytes}));
  }
}

TEST(TrainingOnHosts, TakesMasterWeightsOffloadAndLimits) {
  std::vector<ShardPlan> plans(3, {.unit_bytes = 6000});
  plans[0].precision.master_dtype = plans[0].precision.reduce_dtype = torch::kDouble;
  plans[1].offload = Offload::kHost;
  plans[2].resident_bytes = -1;
  expect_parity_on_hosts(by_halves, plans);
}

// A host keeps its own ranks' shards, and whole units only while they are used.
TEST(TrainingOnHosts, FreesWhatOtherHostsOwn) {
  TESSERA_ON_HOST_ONLY("parameters in shared memory");
  run_hosts(4, by_halves, [](World& world) {
    TrainingRun run = run_by<Mlp, torch::optim::SGD>(torch::optim::SGDOptions(0.1), 512, 4, 5);
    run.in = 512;
    ShardedJob job(run, world, {.unit_bytes = 0});
    auto& pg = *world.process_group();
    for (int step = 0; step < 3; ++step) {
      job.optimizer.zero_grad();
      job.backward(step);
      pg.barrier({"test", Channel::kControl});
      int64_t whole = 0, resident = 0;
      for (const auto& unit : job.sharded.state()->units()) {
        EXPECT_TRUE(unit->is_shared());
        EXPECT_TRUE(unit->frees());
        EXPECT_EQ(unit->state(), Unit::State::kSharded);
        whole += unit->layout().nbytes();
        resident += kPage * resident_pages(unit->full());
      }
      const auto units = static_cast<int64_t>(job.sharded.state()->units().size());
      EXPECT_LE(resident, whole / 2 + 2 * 4096 * units) << "of " << whole;
      pg.barrier({"test", Channel::kControl});
      job.optimizer.step();
    }
    EXPECT_LT(job.sharded.memory().peak_unsharded, 4 * 512 * 512 * 4);
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

// What this rank sends of all units to the one other host.
int64_t bytes_of_shards(const CountedJob<>& job) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < job.units(); ++i) bytes += job.unit(i).shard_numel(job.world.rank()) * 4;
  return bytes;
}
TEST(TrainingOnHosts, SendsAShardOncePerHost) {
  TESSERA_ON_HOST_ONLY("the backends of devices see to hosts themselves");
  run_hosts(4, by_halves, [](World& world) {
    CountedJob job(sgd_run<Mlp>(37, 4, 5), world, {.unit_bytes = 6000});
    const int64_t shards = bytes_of_shards(job);
    job.train(0, 3);
    const CollectiveCounts counts = job.count_step(3);
    // Gathers in forward and in backward; the unit at the turn between them is gathered once.
    EXPECT_GT(counts.all_gather.bytes_sent, shards);
    EXPECT_LE(counts.all_gather.bytes_sent, 2 * shards);
    EXPECT_LE(counts.reduce_scatter.bytes_sent, 2 * shards);
  });
}

// ZeRO++'s secondary shards (hpZ): with `resident_bytes` a host keeps the parameters whole from
// forward to backward, in one copy that its ranks share, and no gather of backward leaves it.
TEST(TrainingOnHosts, ParametersThatStayOnTheHostAreSentOnceAStep) {
  TESSERA_ON_HOST_ONLY("parameters in shared memory");
  for (const int64_t resident_bytes : {0, -1}) {
    run_hosts(4, by_halves, [&](World& world) {
      CountedJob job(sgd_run<Mlp>(37, 4, 5), world,
                     {.unit_bytes = 0, .resident_bytes = resident_bytes});
      const int64_t shards = bytes_of_shards(job);
      job.train(0, 2);
      job.optimizer.zero_grad();
      job.reset_counts();
      const auto forward = job.loss(2);
      const int64_t in_forward = job.shard->counts().all_gather.bytes_sent;
      forward.backward();
      const int64_t in_backward = job.shard->counts().all_gather.bytes_sent - in_forward;
      if (resident_bytes < 0) {
        EXPECT_LE(in_forward, shards);
        EXPECT_EQ(in_backward, 0);
      } else {
        EXPECT_GT(in_backward, shards / 2);
      }
    });
  }
}

}  // namespace tessera::testing::hosts_test
