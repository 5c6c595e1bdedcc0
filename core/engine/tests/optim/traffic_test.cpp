// Traffic and memory of a step, counted and compared with the formulas: exact, with padding.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "engine/model/sharded_state.h"
#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace traffic_test {

using namespace testing;

constexpr int64_t kWidth = 37, kRows = 12, kOut = 5;

// A sharded Mlp behind a counter, with AdamW.
struct Job {
  Job(World& world, ShardPlan plan)
      : world(world), counter(counting_process_group(world.process_group())) {
    plan.process_group = counter;
    net = seeded(3, [] { return std::make_shared<Mlp>(kWidth, 4, kOut); });
    inner =
        std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(1e-3));
    sharded = std::make_unique<Sharded<Mlp>>(fully_shard(net, plan));
    optimizer = std::make_unique<ShardedOptimizer>(*sharded, *inner);
  }
  void step(int i) {
    const Batch batch = global_batch(i, kRows, kWidth, kOut);
    optimizer->zero_grad();
    rank_loss(*net, batch, world.rank(), world.size(), i).backward();
    optimizer->step();
  }
  // Counts of one step, after a few that learn the order.
  CollectiveCounts count_step() {
    for (int i = 0; i < 3; ++i) step(i);
    counter->reset_counts();
    step(3);
    return counter->counts();
  }
  const UnitLayout& unit(size_t i) const { return sharded->state()->units()[i]->layout(); }
  size_t units() const { return sharded->state()->units().size(); }
  // P: bytes of all flat buffers.
  int64_t bytes() const {
    int64_t total = 0;
    for (size_t i = 0; i < units(); ++i) total += unit(i).nbytes();
    return total;
  }
  int64_t shard_bytes(size_t i) const { return unit(i).shard_numel(world.rank()) * 4; }

  World& world;
  std::shared_ptr<CountingProcessGroup> counter;
  std::shared_ptr<Mlp> net;
  std::unique_ptr<torch::optim::AdamW> inner;
  std::unique_ptr<Sharded<Mlp>> sharded;
  std::unique_ptr<ShardedOptimizer> optimizer;
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
      EXPECT_EQ(counts.reduce_scatter.calls, static_cast<int64_t>(job.units()));
      EXPECT_EQ(counts.all_gather.calls, in_one ? 0 : static_cast<int64_t>(job.units()));
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
      const int64_t n = world.size(), units = static_cast<int64_t>(job.units());
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
    for (size_t i = 0; i < job.units(); ++i) own += job.shard_bytes(i);
    EXPECT_EQ(counts.all_gather.bytes_sent, own * (world.size() - 1));
    EXPECT_EQ(counts.reduce_scatter.bytes_sent, job.bytes() - own);
  });
}

TEST_P(Traffic, FrozenParametersSendNoGradients) {
  if (ranks() == 1) return;
  run_world(ranks(), [&](World& world) {
    auto counter = counting_process_group(world.process_group());
    auto net = on_test_device(std::make_shared<Mlp>(kWidth, 2, kOut));
    net->fcs[0]->weight.requires_grad_(false);
    torch::optim::SGD inner(net->parameters(), 0.1);
    auto sharded = fully_shard(net, {.level = ShardLevel::kGradients, .process_group = counter});
    ShardedOptimizer optimizer(sharded, inner);
    int64_t trainable = 0;
    for (const auto& unit : sharded.state()->units()) {
      if (unit->layout().slots[0].requires_grad) trainable += unit->layout().nbytes();
    }
    for (int step = 0; step < 2; ++step) {
      counter->reset_counts();
      optimizer.zero_grad();
      rank_loss(*net, global_batch(step, kRows, kWidth, kOut), world.rank(), world.size(), step)
          .backward();
      optimizer.step();
    }
    EXPECT_EQ(counter->counts().reduce_scatter.bytes_sent,
              trainable * (world.size() - 1) / world.size());
    EXPECT_EQ(counter->counts().all_gather.bytes_sent,
              trainable * (world.size() - 1) / world.size());
    EXPECT_EQ(sharded.memory().gradients, trainable / world.size());
  });
}

// --- memory
// ----------------------------------------------------------------------------------------

int64_t param_bytes(torch::nn::Module& module) {
  int64_t total = 0;
  for (const auto& param : module.parameters()) total += static_cast<int64_t>(param.nbytes());
  return total;
}

TEST_P(Traffic, EachLevelKeepsItsPartOfParametersGradientsAndState) {
  for (const auto level : {ShardLevel::kNone, ShardLevel::kOptimizerState, ShardLevel::kGradients,
                           ShardLevel::kParameters}) {
    std::vector<int64_t> state(ranks());
    int64_t whole_state = 0;
    run_world(ranks(), [&](World& world) {
      Job job(world, {.level = level, .unit_bytes = 6000});
      job.count_step();
      const int64_t p = job.bytes(), n = world.size();
      const ShardMemory memory = job.optimizer->memory();
      EXPECT_EQ(memory.parameters, level == ShardLevel::kParameters ? p / n : p);
      EXPECT_EQ(memory.gradients, level == ShardLevel::kNone ? p : p / n);
      state[world.rank()] = memory.optimizer_state;
      EXPECT_LE(memory.optimizer_state, level == ShardLevel::kNone ? 2 * p : 2 * p / n);
      if (world.rank() == 0) whole_state = 2 * param_bytes(*job.net);
      job.optimizer->zero_grad();
      EXPECT_EQ(job.sharded->memory().gradients, 0);
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
      int64_t largest = 0;
      for (size_t i = 0; i < job.units(); ++i) largest = std::max(largest, job.unit(i).nbytes());
      const int64_t peak = job.sharded->memory().peak_unsharded;
      if (world.size() == 1) {
        EXPECT_EQ(peak, 0);
      } else {
        EXPECT_LE(peak, (1 + prefetch) * largest);
        EXPECT_GE(peak, largest);
      }
      EXPECT_LE(job.sharded->memory().peak_in_flight, 3 * largest);
    });
  }
}

TEST_P(Traffic, ResidentBytesBoundTheGatheredParameters) {
  if (ranks() == 1) return;
  run_world(ranks(), [&](World& world) {
    Job job(world, {.unit_bytes = 6000, .resident_bytes = 7000, .prefetch = 0});
    const auto counts = job.count_step();
    int64_t largest = 0;
    for (size_t i = 0; i < job.units(); ++i) largest = std::max(largest, job.unit(i).nbytes());
    EXPECT_LE(job.sharded->memory().peak_unsharded, largest + 7000);
    // One unit more stays between forward and backward.
    EXPECT_EQ(counts.all_gather.calls, 2 * static_cast<int64_t>(job.units()) - 3);
  });
}

}  // namespace traffic_test
}  // namespace tessera
