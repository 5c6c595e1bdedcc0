// Several backwards before a step, every way of clearing gradients, and passes that end early.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "engine/model/sharded_state.h"
#include "support/models.h"
#include "support/recomputed_layer.h"
#include "support/run_world.h"

namespace tessera {
namespace accumulation_test {

using namespace testing;

constexpr int kSteps = 3;
constexpr double kTolerance = 2e-6;

const std::vector<ShardLevel> kLevels = {ShardLevel::kNone, ShardLevel::kOptimizerState,
                                         ShardLevel::kGradients, ShardLevel::kParameters};

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

// A sharded model with its optimizer, to be trained backward by backward.
struct Job {
  Job(const TrainingRun& run, World& world, const ShardPlan& plan)
      : run(run),
        world(world),
        net(run.make_net()),
        inner(run.make_optimizer(*net)),
        sharded(fully_shard(net, plan)),
        optimizer(sharded, *inner, {.fused = false}) {}
  void backward(int batch) {
    rank_loss(*net, global_batch(batch, run.rows, run.in, run.out), world.rank(), world.size(), 0)
        .backward();
  }
  void backward_without_sync(int batch) {
    const auto guard = sharded.no_sync();
    backward(batch);
  }
  const TrainingRun& run;
  World& world;
  std::shared_ptr<Net> net;
  std::unique_ptr<torch::optim::Optimizer> inner;
  Sharded<Net> sharded;
  ShardedOptimizer optimizer;
};

TEST(Accumulation, EveryMixOfSyncedAndUnsyncedBackwardsGivesTheSumOfAll) {
  const TrainingRun run = mlp_run();
  const std::vector<std::vector<int>> patterns = {
      {1, 1}, {0, 1}, {0, 0, 1}, {1, 0, 1}, {0, 1, 0, 1}};
  for (const auto& synced : patterns) {
    const auto expected = train_alone_on(run, static_cast<int>(synced.size()));
    for (const int ranks : {1, 2, 3}) {
      for (const auto level : kLevels) {
        run_world(ranks, [&](World& world) {
          Job job(run, world, {.level = level, .unit_bytes = 6000});
          for (int step = 0; step < kSteps; ++step) {
            job.optimizer.zero_grad();
            for (size_t i = 0; i < synced.size(); ++i) {
              const int batch = step * 10 + static_cast<int>(i);
              synced[i] ? job.backward(batch) : job.backward_without_sync(batch);
            }
            job.optimizer.step();
          }
          expect_same_state(
              job.sharded.full_state(), expected, kTolerance,
              fmt::format("{} ranks, level {}, {}", ranks, static_cast<int>(level), synced));
        });
      }
    }
  }
}

TEST(Accumulation, AnUnsyncedBackwardSendsNoGradients) {
  run_world(2, [&](World& world) {
    auto counter = counting_process_group(world.process_group());
    const TrainingRun run = mlp_run();
    Job job(run, world, {.level = ShardLevel::kGradients, .process_group = counter});
    counter->reset_counts();
    job.backward_without_sync(0);
    EXPECT_EQ(counter->counts().calls(), 0);
    job.backward(1);
    EXPECT_EQ(counter->counts().reduce_scatter.calls,
              static_cast<int64_t>(job.sharded.state()->units().size()));
  });
}

TEST(Accumulation, UnsyncedBackwardsDoNotGrowTheTrafficOfLaterSteps) {
  run_world(2, [&](World& world) {
    auto counter = counting_process_group(world.process_group());
    const TrainingRun run = mlp_run();
    Job job(run, world, {.unit_bytes = 6000, .process_group = counter});
    std::vector<int64_t> gathered;
    for (int step = 0; step < 5; ++step) {
      job.optimizer.zero_grad();
      if (step < 2) job.backward_without_sync(10 + step);
      if (step < 2) job.backward_without_sync(20 + step);
      counter->reset_counts();
      job.backward(step);
      job.optimizer.step();
      gathered.push_back(counter->counts().all_gather.bytes_sent);
    }
    EXPECT_EQ(gathered[4], gathered[3]);
    const auto units = static_cast<int64_t>(job.sharded.state()->units().size());
    EXPECT_LE(counter->counts().all_gather.calls, 2 * units);
  });
}

TEST(Accumulation, EveryZeroGradClearsTheGradients) {
  const TrainingRun run = mlp_run();
  const auto expected = train_alone_on(run, 1);
  const std::vector<std::function<void(Job&)>> ways = {
      [](Job& job) { job.optimizer.zero_grad(); }, [](Job& job) { job.sharded.zero_grad(); },
      [](Job& job) { job.inner->zero_grad(); },    [](Job& job) { job.inner->zero_grad(false); },
      [](Job& job) { job.net->zero_grad(); },      [](Job& job) { job.net->zero_grad(false); }};
  for (const int ranks : {1, 2, 4}) {
    for (const auto level : kLevels) {
      for (size_t way = 0; way < ways.size(); ++way) {
        run_world(ranks, [&](World& world) {
          Job job(run, world, {.level = level, .unit_bytes = 6000});
          for (int step = 0; step < kSteps; ++step) {
            job.backward(77);  // to be dropped
            if (step == 1) job.backward_without_sync(78);
            ways[way](job);
            job.backward(step * 10);
            job.optimizer.step();
            ways[way](job);
          }
          expect_same_state(
              job.sharded.full_state(), expected, kTolerance,
              fmt::format("{} ranks, level {}, way {}", ranks, static_cast<int>(level), way));
        });
      }
    }
  }
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

TEST(Accumulation, AStepThatIsSkippedLeavesNoTrace) {
  const TrainingRun run = mlp_run();
  const auto expected = train_alone_on(run, 1);
  run_world(2, [&](World& world) {
    Job job(run, world, {.unit_bytes = 6000});
    for (int step = 0; step < kSteps; ++step) {
      job.optimizer.zero_grad();
      job.backward(90 + step);  // not stepped on, for example because of an overflow
      job.optimizer.zero_grad();
      job.backward(step * 10);
      job.optimizer.step();
    }
    expect_same_state(job.sharded.full_state(), expected, kTolerance, "skipped steps");
  });
}

TEST(Accumulation, AnExceptionInsideTheGuardEndsIt) {
  const TrainingRun run = mlp_run();
  const auto expected = train_alone_on(run, 1);
  for (const auto level : kLevels) {
    run_world(2, [&](World& world) {
      Job job(run, world, {.level = level, .unit_bytes = 6000});
      for (int step = 0; step < kSteps; ++step) {
        job.optimizer.zero_grad();
        try {
          const auto guard = job.sharded.no_sync();
          job.net->forward(torch::randn({2, 37}));
          job.net->forward(torch::randn({2, 36}));
          ADD_FAILURE() << "36 columns must not fit";
        } catch (const c10::Error&) {
        }
        job.backward(step * 10);
        job.optimizer.step();
      }
      expect_same_state(job.sharded.full_state(), expected, kTolerance, "exception in no_sync");
    });
  }
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
  for (const int ranks : {1, 2, 3}) {
    for (const auto level : kLevels) {
      run_world(ranks, [&](World& world) {
        Job job(run, world, {.level = level, .unit_bytes = 6000});
        train(
            *job.net, [&] { job.optimizer.zero_grad(); }, [&] { job.optimizer.step(); },
            world.rank(), world.size());
        expect_same_state(job.sharded.full_state(), plain_state(*alone), kTolerance,
                          "retain_graph");
      });
    }
  }
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
  for (const int ranks : {1, 2, 3}) {
    for (const auto level : kLevels) {
      expect_parity(sgd_run<Recomputing>(), ranks, {.level = level, .unit_bytes = 6000},
                    "recomputed layers", {.fused = false}, kTolerance);
    }
  }
}

}  // namespace accumulation_test
}  // namespace tessera
