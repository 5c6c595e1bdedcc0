// Traffic and memory of a step, counted and compared with the formulas: exact, with padding.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/counted_job.h"

namespace tessera::testing::traffic_test {

constexpr int64_t kWidth = 37, kRows = 12, kOut = 5;

// A sharded Mlp behind a counter, with AdamW.
TrainingRun adamw() {
  return run_by<Mlp, torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3), kWidth, 4, kOut);
}

struct Job : CountedJob<Mlp> {
  Job(World& world, const ShardPlan& plan) : CountedJob(adamw(), world, plan, {}) {}
  // Counts of one step, after a few that learn the order.
  CollectiveCounts count_step() {
    train(0, 3);
    return CountedJob::count_step(3);
  }
  int64_t largest() const {
    int64_t nbytes = 0;
    for (int64_t i = 0; i < units(); ++i) nbytes = std::max(nbytes, unit(i).nbytes());
    return nbytes;
  }
};

class Traffic : public ::testing::TestWithParam<int> {
 protected:
  int ranks() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Traffic, ::testing::Values(1, 2, 3, 4));

TEST_P(Traffic, BelowParametersAStepSendsTwiceTheParametersLessTheOwnShard) {
  for (const auto level :
       {ShardLevel::kNone, ShardLevel::kOptimizerState, ShardLevel::kGradients}) {
    run_world(ranks(), [&](World& world) {
      Job job(world, {.level = level, .unit_bytes = 6000});
      const auto counts = job.count_step();
      if (world.size() == 1) {
        EXPECT_EQ(counts.bytes_sent(), 0);
        return;
      }
      const int64_t n = world.size(), sent = job.bytes() * (n - 1) / n;
      // At kNone, reductions gather their sums.
      const bool in_one = level == ShardLevel::kNone && counts.all_gather.calls == 0;
      EXPECT_EQ(in_one, level == ShardLevel::kNone && tests_on_host());
      EXPECT_EQ(counts.reduce_scatter.bytes_sent, in_one ? 2 * sent : sent);
      EXPECT_EQ(counts.all_gather.bytes_sent, in_one ? 0 : sent);
      EXPECT_EQ(counts.reduce_scatter.calls, job.units());
      EXPECT_EQ(counts.all_gather.calls, in_one ? 0 : job.units());
      EXPECT_EQ(counts.all_reduce.calls, 1) << "which parameters were used";
      EXPECT_EQ(counts.broadcast.calls + counts.barrier.calls, 0);
    });
  }
}

TEST_P(Traffic, AtParametersUnitsAreGatheredTwiceExceptThoseThatStayOrThatBackwardDoesNotNeed) {
  for (const int prefetch : {0, 1, 2}) {
    run_world(ranks(), [&](World& world) {
      Job job(world, {.unit_bytes = 6000, .prefetch = prefetch});
      const auto counts = job.count_step();
      if (world.size() == 1) {
        EXPECT_EQ(counts.bytes_sent(), 0);
        return;
      }
      const int64_t n = world.size(), units = job.units();
      ASSERT_GE(units, 4);
      // The last unit of forward is the first of backward; prefetching, so is the one before it.
      const int64_t stay = prefetch == 0 ? 1 : 2;
      // The input needs no gradient, so backward does not read the first layer's weights.
      int64_t gathered = 2 * job.bytes() - job.unit(0).nbytes();
      for (int64_t i = 0; i < stay; ++i) gathered -= job.unit(units - 1 - i).nbytes();
      EXPECT_EQ(counts.all_gather.bytes_sent, gathered * (n - 1) / n) << "prefetch " << prefetch;
      EXPECT_EQ(counts.all_gather.calls, 2 * units - stay - 1);
      EXPECT_EQ(counts.reduce_scatter.bytes_sent, job.bytes() * (n - 1) / n);
      EXPECT_EQ(counts.reduce_scatter.calls, units);
      EXPECT_EQ(counts.all_reduce.calls, 1);
      EXPECT_EQ(counts.broadcast.calls + counts.barrier.calls, 0);
    });
  }
}

TEST_P(Traffic, WithoutALimitOfResidentBytesUnitsAreGatheredOnce) {
  if (ranks() == 1) return;
  run_world(ranks(), [&](World& world) {
    Job job(world, {.unit_bytes = 6000, .resident_bytes = -1});
    const auto counts = job.count_step();
    EXPECT_EQ(counts.all_gather.bytes_sent, job.bytes() * (world.size() - 1) / world.size());
    EXPECT_EQ(counts.reduce_scatter.bytes_sent, job.bytes() * (world.size() - 1) / world.size());
  });
}

TEST_P(Traffic, WholeParametersSendWhatEachRankOwns) {
  if (ranks() == 1) return;
  run_world(ranks(), [&](World& world) {
    Job job(
        world,
        {.level = ShardLevel::kGradients, .partition = Partition::kWholeParam, .unit_bytes = 6000});
    const auto counts = job.count_step();
    int64_t own = 0;
    for (int64_t i = 0; i < job.units(); ++i) own += job.unit(i).shard_numel(world.rank()) * 4;
    EXPECT_EQ(counts.all_gather.bytes_sent, own * (world.size() - 1));
    EXPECT_EQ(counts.reduce_scatter.bytes_sent, job.bytes() - own);
  });
}

TEST_P(Traffic, FrozenParametersSendNoGradients) {
  if (ranks() == 1) return;
  run_world(ranks(), [&](World& world) {
    TrainingRun run = sgd_run<Mlp>(kWidth, 2, kOut);
    run.make_net = [make_net = run.make_net] {
      const auto net = make_net();
      static_cast<Mlp&>(*net).fcs[0]->weight.requires_grad_(false);
      return net;
    };
    CountedJob job(run, world, {.level = ShardLevel::kGradients}, {});
    int64_t trainable = 0;
    for (int64_t i = 0; i < job.units(); ++i)
      if (job.unit(i).slots[0].requires_grad) trainable += job.unit(i).nbytes();
    job.step(0);
    const CollectiveCounts counts = job.count_step(1);
    EXPECT_EQ(counts.reduce_scatter.bytes_sent, trainable * (world.size() - 1) / world.size());
    EXPECT_EQ(counts.all_gather.bytes_sent, trainable * (world.size() - 1) / world.size());
    EXPECT_EQ(job.sharded.memory().gradients, trainable / world.size());
  });
}

// --- memory

int64_t param_bytes(torch::nn::Module& module) {
  int64_t total = 0;
  for (const auto& param : module.parameters()) total += static_cast<int64_t>(param.nbytes());
  return total;
}

TEST_P(Traffic, EachLevelKeepsItsPartOfParametersGradientsAndState) {
  for (const auto level : kAllLevels) {
    std::vector<int64_t> state(ranks());
    int64_t whole_state = 0;
    run_world(ranks(), [&](World& world) {
      Job job(world, {.level = level, .unit_bytes = 6000});
      job.count_step();
      const int64_t p = job.bytes(), n = world.size();
      const ShardMemory memory = job.optimizer.memory();
      EXPECT_EQ(memory.parameters, level == ShardLevel::kParameters ? p / n : p);
      EXPECT_EQ(memory.gradients, level == ShardLevel::kNone ? p : p / n);
      state[world.rank()] = memory.optimizer_state;
      EXPECT_LE(memory.optimizer_state, level == ShardLevel::kNone ? 2 * p : 2 * p / n);
      if (world.rank() == 0) whole_state = 2 * param_bytes(*job.net);
      job.optimizer.zero_grad();
      EXPECT_EQ(job.sharded.memory().gradients, 0);
    });
    // Shards of the state have no padding: together they are the state of one process.
    const int64_t sum = std::accumulate(state.begin(), state.end(), int64_t{0});
    EXPECT_EQ(sum, level == ShardLevel::kNone ? whole_state * ranks() : whole_state);
  }
}

TEST_P(Traffic, UnitsInFlightBoundTheGatheredParameters) {
  for (const int prefetch : {0, 1, 2}) {
    run_world(ranks(), [&](World& world) {
      Job job(world, {.unit_bytes = 6000, .prefetch = prefetch});
      job.count_step();
      const int64_t largest = job.largest(), peak = job.sharded.memory().peak_unsharded;
      if (world.size() == 1) {
        EXPECT_EQ(peak, 0);
      } else {
        EXPECT_LE(peak, (1 + prefetch) * largest);
        EXPECT_GE(peak, largest);
      }
      EXPECT_LE(job.sharded.memory().peak_in_flight, 3 * largest);
    });
  }
}

TEST_P(Traffic, ResidentBytesBoundTheGatheredParameters) {
  if (ranks() == 1) return;
  run_world(ranks(), [&](World& world) {
    Job job(world, {.unit_bytes = 6000, .resident_bytes = 7000, .prefetch = 0});
    const auto counts = job.count_step();
    EXPECT_LE(job.sharded.memory().peak_unsharded, job.largest() + 7000);
    // One unit more stays between forward and backward.
    EXPECT_EQ(counts.all_gather.calls, 2 * job.units() - 3);
  });
}

TEST_P(Traffic, ResidentBytesCanBeSetAnewFromTheNextStepOn) {
  if (ranks() == 1) return;
  run_world(ranks(), [&](World& world) {
    Job job(world, {.unit_bytes = 6000, .prefetch = 0});
    const int64_t freed = job.count_step().all_gather.calls;
    job.sharded.set_resident_bytes(-1);
    job.count_step();
    EXPECT_EQ(job.count_step().all_gather.calls, job.units());
    job.sharded.set_resident_bytes(0);
    job.count_step();
    EXPECT_EQ(job.count_step().all_gather.calls, freed);
    expect_error([&] { job.sharded.set_resident_bytes(-2); }, {"set_resident_bytes", "-2"});
  });
}

}  // namespace tessera::testing::traffic_test
