// Several backwards before a step, every way of clearing gradients, and passes that end early.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "support/counted_job.h"
#include "support/recomputed_layer.h"

namespace tessera::testing::accumulation_test {

constexpr int kSteps = 3;
constexpr double kTolerance = 2e-6;

TrainingRun mlp_run() { return sgd_run<Mlp>(37, 2, 5); }

// Trains in one process with `micro` batches a step.
std::vector<NamedTensor> train_alone_on(const TrainingRun& run, int micro) {
  const auto net = run.make_net();
  const auto optimizer = run.make_optimizer(*net);
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    for (int i = 0; i < micro; ++i) {
      rank_loss(*net, global_batch(step * 10 + i, run.rows, run.in, run.out), 0, 1, step)
          .backward();
    }
    optimizer->step();
  }
  return plain_state(*net);
}

using Job = ShardedJob<>;

TEST(Accumulation, EveryMixOfSyncedAndUnsyncedBackwardsGivesTheSumOfAll) {
  const TrainingRun run = mlp_run();
  const std::vector<std::vector<int>> patterns = {
      {1, 1}, {0, 1}, {0, 0, 1}, {1, 0, 1}, {0, 1, 0, 1}};
  for (const auto& synced : patterns) {
    const auto expected = train_alone_on(run, static_cast<int>(synced.size()));
    for (const int ranks : {1, 2, 3}) {
      on_worlds({ranks}, at_each_level({.unit_bytes = 6000}),
                [&](World& world, const ShardPlan& plan) {
                  Job job(run, world, plan);
                  for (int step = 0; step < kSteps; ++step) {
                    job.optimizer.zero_grad();
                    for (size_t i = 0; i < synced.size(); ++i) {
                      const int batch = step * 10 + static_cast<int>(i);
                      synced[i] ? job.backward(batch) : job.backward_without_sync(batch);
                    }
                    job.optimizer.step();
                  }
                  expect_same_state(job.state(), expected, kTolerance, fmt::format("{}", synced));
                });
    }
  }
}

TEST(Accumulation, AnUnsyncedBackwardSendsNoGradients) {
  run_world(2, [&](World& world) {
    CountedJob job(mlp_run(), world, {.level = ShardLevel::kGradients});
    job.backward_without_sync(0);
    EXPECT_EQ(job.shard->counts().calls(), 0);
    job.backward(1);
    EXPECT_EQ(job.shard->counts().reduce_scatter.calls, job.units());
  });
}

TEST(Accumulation, UnsyncedBackwardsDoNotGrowTheTrafficOfLaterSteps) {
  run_world(2, [&](World& world) {
    CountedJob job(mlp_run(), world, {.unit_bytes = 6000});
    std::vector<int64_t> gathered;
    for (int step = 0; step < 5; ++step) {
      job.optimizer.zero_grad();
      if (step < 2) job.backward_without_sync(10 + step);
      if (step < 2) job.backward_without_sync(20 + step);
      job.reset_counts();
      job.backward(step);
      job.optimizer.step();
      gathered.push_back(job.shard->counts().all_gather.bytes_sent);
    }
    EXPECT_EQ(gathered[4], gathered[3]);
    EXPECT_LE(job.shard->counts().all_gather.calls, 2 * job.units());
  });
}

TEST(Accumulation, EveryZeroGradClearsTheGradients) {
  const TrainingRun run = mlp_run();
  const auto expected = train_alone_on(run, 1);
  const std::vector<std::function<void(Job&)>> ways = {
      [](Job& job) { job.optimizer.zero_grad(); }, [](Job& job) { job.sharded.zero_grad(); },
      [](Job& job) { job.inner->zero_grad(); },    [](Job& job) { job.inner->zero_grad(false); },
      [](Job& job) { job.net->zero_grad(); },      [](Job& job) { job.net->zero_grad(false); }};
  on_worlds({1, 2, 4}, at_each_level({.unit_bytes = 6000}),
            [&](World& world, const ShardPlan& plan) {
              for (size_t way = 0; way < ways.size(); ++way) {
                Job job(run, world, plan);
                for (int step = 0; step < kSteps; ++step) {
                  job.backward(77);  // to be dropped
                  if (step == 1) job.backward_without_sync(78);
                  ways[way](job);
                  job.backward(step * 10);
                  job.optimizer.step();
                  ways[way](job);
                }
                expect_same_state(job.state(), expected, kTolerance, fmt::format("way {}", way));
              }
            });
}

TEST(Accumulation, ClearingByTheInnerOptimizerIsSeenOnRanksWithoutAShardOfTheParameter) {
  run_world(4, [&](World& world) {
    TrainingRun run = sgd_run<Mlp>(4, 1, 2);
    run.in = 4, run.out = 2;
    Job job(run, world, {.level = ShardLevel::kGradients, .partition = Partition::kWholeParam});
    job.backward(0);
    job.optimizer.step();
    job.inner->zero_grad();
    EXPECT_FALSE(job.sharded.full_grad("head.weight").defined());
    expect_error([&] { job.optimizer.step(); }, {"[step]", "backward"});
  });
}

TEST(Accumulation, AnExceptionInsideTheGuardEndsIt) {
  const TrainingRun run = mlp_run();
  const auto expected = train_alone_on(run, 1);
  on_worlds({2}, at_each_level({.unit_bytes = 6000}), [&](World& world, const ShardPlan& plan) {
    Job job(run, world, plan);
    for (int step = 0; step < kSteps; ++step) {
      job.optimizer.zero_grad();
      try {
        const auto guard = job.sharded.no_sync();
        job.net->forward(torch::randn({2, 37}));
        job.net->forward(torch::randn({2, 36}));
        ADD_FAILURE() << "36 columns must not fit";
      } catch (const c10::Error&) {
      }
      job.step(step * 10);
    }
    expect_same_state(job.state(), expected, kTolerance, "exception in no_sync");
  });
}

TEST(Accumulation, ASecondBackwardOfOneForwardAddsItsGradients) {
  const TrainingRun run = mlp_run();
  const auto train = [&](Net& net, const std::function<void()>& zero,
                         const std::function<void()>& step, int rank, int size) {
    for (int i = 0; i < kSteps; ++i) {
      zero();
      const auto loss = rank_loss(net, global_batch(i, run.rows, run.in, run.out), rank, size, 0);
      loss.backward({}, /*retain_graph=*/true);
      (2 * loss).backward();
      step();
    }
  };
  const auto alone = run.make_net();
  const auto plain = run.make_optimizer(*alone);
  train(
      *alone, [&] { plain->zero_grad(); }, [&] { plain->step(); }, 0, 1);
  on_worlds({1, 2, 3}, at_each_level({.unit_bytes = 6000}),
            [&](World& world, const ShardPlan& plan) {
              Job job(run, world, plan);
              train(
                  *job.net, [&] { job.optimizer.zero_grad(); }, [&] { job.optimizer.step(); },
                  world.rank(), world.size());
              expect_same_state(job.state(), plain_state(*alone), kTolerance, "retain_graph");
            });
}

// Uses one layer twice, recomputing it each time.
struct Recomputing : Net {
  Recomputing() {
    first = register_module("first", torch::nn::Linear(37, 37));
    layer = register_module("layer", torch::nn::Linear(37, 37));
    head = register_module("head", torch::nn::Linear(37, 5));
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::gelu(first->forward(x));
    x = torch::gelu(RecomputedLayer::apply(x, layer));
    return head->forward(torch::gelu(RecomputedLayer::apply(x, layer)));
  }
  torch::nn::Linear first{nullptr}, layer{nullptr}, head{nullptr};
};

TEST(Accumulation, GradientsThatArriveAgainAfterTheirUnitWasReducedAreAdded) {
  for (const int ranks : {1, 2, 3})
    expect_parity_of_each(sgd_run<Recomputing>(), ranks,
                          cases_of(at_each_level({.unit_bytes = 6000}), kTolerance));
}

}  // namespace tessera::testing::accumulation_test
