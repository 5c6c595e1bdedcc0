// Ranks that take different numbers of steps.

#include <gtest/gtest.h>
#include <tessera/engine/exponential_average.h>

#include "support/sharded_job.h"

namespace tessera::testing::join_test {

constexpr int64_t kRows = 12, kIn = 37, kOut = 5;

std::shared_ptr<Net> make_mlp() {
  return seeded(7, [] { return std::make_shared<Mlp>(); });
}

std::unique_ptr<torch::optim::Optimizer> make_adamw(Net& net) {
  return std::make_unique<torch::optim::AdamW>(net.parameters(), torch::optim::AdamWOptions(0.01));
}

// Rank r takes 2 r + 1 steps.
int steps_of(int rank) { return 2 * rank + 1; }

struct Options {
  double clip = 0;
  int backwards = 1;
  bool schedules = false;
  bool cycles = false;   // Adam's first beta
  bool reduces = false;  // backwards under no_sync(), then reduce()
  bool goes_on = false;  // all ranks take two steps after join()
  bool leaves = false;   // ranks run out of data within a step, after its first backward
};

void set_beta(torch::optim::Optimizer& optimizer, int step) {
  auto& options = optimizer.param_groups()[0].options();
  static_cast<torch::optim::AdamWOptions&>(options).betas({0.9 - 0.1 * step, 0.999});
}

// One process: ranks that are done contribute nothing; the mean is over all ranks.
std::vector<NamedTensor> train_alone(int ranks, const Options& options) {
  const auto net = make_mlp();
  const auto optimizer = make_adamw(*net);
  torch::optim::StepLR scheduler(*optimizer, 1, 0.7);
  const int joined = steps_of(ranks - 1);
  for (int step = 0; step < joined + (options.goes_on ? 2 : 0); ++step) {
    optimizer->zero_grad();
    for (int backward = 0; backward < options.backwards; ++backward) {
      const Batch batch = global_batch(step * 10 + backward, kRows, kIn, kOut);
      for (int rank = 0; rank < ranks; ++rank) {
        const bool leaves = options.leaves && step == steps_of(rank) && backward == 0;
        if (step < steps_of(rank) || step >= joined || leaves)
          (rank_loss(*net, batch, rank, ranks, step) / ranks).backward();
      }
    }
    if (options.clip > 0) torch::nn::utils::clip_grad_norm_(net->parameters(), options.clip);
    if (options.cycles) set_beta(*optimizer, step);
    optimizer->step();
    if (options.schedules) scheduler.step();
  }
  return plain_state(*net);
}

TrainingRun joined_run() {
  TrainingRun run = sgd_run<Mlp>();
  run.make_optimizer = make_adamw;
  return run;
}
struct Joined : ShardedJob<> {
  explicit Joined(World& world, const ShardPlan& plan = {.level = ShardLevel::kGradients})
      : ShardedJob(joined_run(), world, plan) {}
};

State train_joined(World& world, const ShardPlan& plan, const Options& options) {
  Joined job(world, plan);
  torch::optim::StepLR scheduler(*job.inner, 1, 0.7);
  const auto accumulate = [&](int step, int backwards) {
    job.optimizer.zero_grad();
    for (int backward = 0; backward < backwards; ++backward) {
      const int batch = step * 10 + backward;
      const bool is_last = backward + 1 == options.backwards;
      options.reduces || (options.leaves && !is_last) ? job.backward_without_sync(batch)
                                                      : job.backward(batch);
    }
  };
  const auto take_step = [&](int step) {
    accumulate(step, options.backwards);
    if (options.reduces) job.sharded.reduce();
    if (options.clip > 0) job.optimizer.clip_grad_norm_(options.clip);
    if (options.cycles) set_beta(*job.inner, step);
    job.optimizer.step();
    if (options.schedules) scheduler.step();
  };
  const int joined = steps_of(world.size() - 1);
  join(job.sharded, {&job.optimizer}, [&] {
    const int steps = steps_of(world.rank());
    for (int step = 0; step < steps; ++step) take_step(step);
    if (options.leaves && steps < joined) accumulate(steps, 1);
  });
  EXPECT_EQ(job.optimizer.steps(), joined);
  for (int step = steps_of(world.rank()); step < joined && options.schedules; ++step)
    scheduler.step();
  for (int step = joined; step < joined + 2 && options.goes_on; ++step) take_step(step);
  return job.state();
}

// At the levels at which parameters stay whole.
void expect_as_one_process(const Options& options) {
  std::vector<ShardPlan> plans = with_each_partition({.unit_bytes = 3000});
  std::erase_if(plans, [](const auto& plan) { return plan.level == ShardLevel::kParameters; });
  for (const int ranks : {1, 2, 3}) {
    const State expected = train_alone(ranks, options);
    const auto states = results_of(ranks, [&](World& world) {
      std::vector<State> of_plans;
      for (const ShardPlan& plan : plans) of_plans.push_back(train_joined(world, plan, options));
      return of_plans;
    });
    for (size_t i = 0; i < plans.size(); ++i) {
      for (const auto& of_plans : states) {
        expect_same_state(of_plans[i], expected, 1e-5, describe(ranks, plans[i]));
        expect_same_state(of_plans[i], states[0][i], 0, "replicas");
      }
    }
  }
}

TEST(Join, UnevenStepsTrainAsOneProcess) { expect_as_one_process({}); }
TEST(Join, WithClipping) { expect_as_one_process({.clip = 0.05}); }
TEST(Join, WithSeveralBackwardsAStep) { expect_as_one_process({.backwards = 3}); }
TEST(Join, StepsOfThoseThatAreDoneHaveTheOthersLearningRate) {
  expect_as_one_process({.schedules = true});
}
TEST(Join, StepsOfThoseThatAreDoneHaveTheOthersOptions) { expect_as_one_process({.cycles = true}); }
TEST(Join, WithReductionsOfSeveralBackwards) {
  expect_as_one_process({.backwards = 2, .reduces = true});
}
TEST(Join, WithRanksThatRunOutOfDataWithinAStep) {
  expect_as_one_process({.backwards = 3, .leaves = true});
  expect_as_one_process({.backwards = 2, .reduces = true, .leaves = true});
}
TEST(Join, SchedulersOfThoseThatWereDoneGoOnFromTheirOwnRates) {
  expect_as_one_process({.schedules = true, .goes_on = true});
}

// An optimizer of every second parameter.
std::unique_ptr<torch::optim::Optimizer> make_adamw_of_half(Net& net, size_t first) {
  std::vector<torch::Tensor> half;
  const auto all = net.parameters();
  for (size_t i = first; i < all.size(); i += 2) half.push_back(all[i]);
  return std::make_unique<torch::optim::AdamW>(half, torch::optim::AdamWOptions(0.01));
}

// Steps two optimizers, of which one keeps its gradients, and one has sometimes none.
template <class Optimizer>
void step_two(int step, Optimizer& first, Optimizer& second) {
  if (step % 3 == 1) first.zero_grad();
  first.step();
  second.step();
  step % 2 == 0 ? second.zero_grad() : first.zero_grad();
}

std::vector<NamedTensor> train_two_alone(int ranks) {
  const auto net = make_mlp();
  const auto first = make_adamw_of_half(*net, 0), second = make_adamw_of_half(*net, 1);
  for (int step = 0; step < steps_of(ranks - 1); ++step) {
    for (int rank = 0; rank < ranks; ++rank)
      if (step < steps_of(rank))
        (rank_loss(*net, global_batch(step, kRows, kIn, kOut), rank, ranks, step) / ranks)
            .backward();
    step_two(step, *first, *second);
  }
  auto state = plain_state(*net);
  for (const auto& item : net->named_parameters())
    if (item.value().grad().defined())
      state.push_back({"gradient of " + item.key(), item.value().grad()});
  return state;
}

std::vector<NamedTensor> train_two_joined(World& world, const ShardPlan& plan) {
  const auto net = make_mlp();
  const auto first = make_adamw_of_half(*net, 0), second = make_adamw_of_half(*net, 1);
  auto sharded = fully_shard(net, plan);
  ShardedOptimizer steps_first(sharded, *first, {.fused = false});
  ShardedOptimizer steps_second(sharded, *second, {.fused = false});
  join(sharded, {&steps_first, &steps_second}, [&] {
    for (int step = 0; step < steps_of(world.rank()); ++step) {
      rank_loss(*net, global_batch(step, kRows, kIn, kOut), world.rank(), world.size(), step)
          .backward();
      step_two(step, steps_first, steps_second);
    }
  });
  auto state = sharded.full_state();
  for (const auto& item : net->named_parameters())
    if (const auto grad = sharded.full_grad(item.value()); grad.defined())
      state.push_back({"gradient of " + item.key(), grad});
  return state;
}

// A rank that is done has the gradients that the others have, of each parameter.
TEST(Join, WithOptimizersOfWhichOneClearsItsGradients) {
  for (const ShardLevel level :
       {ShardLevel::kNone, ShardLevel::kOptimizerState, ShardLevel::kGradients}) {
    for (const int ranks : {2, 3}) {
      const auto expected = train_two_alone(ranks);
      run_world(ranks, [&](World& world) {
        const auto state = train_two_joined(world, {.level = level, .unit_bytes = 3000});
        expect_same_state(state, expected, 1e-5, std::to_string(ranks) + " ranks");
      });
    }
  }
}

TEST(Join, RefusesGradientsThatTheProgramReduces) {
  run_world(2, [](World&) {
    const auto net = make_mlp();
    const auto inner = make_adamw(*net);
    auto sharded = fully_shard(net, {.level = ShardLevel::kNone, .reduce_gradients = false});
    ShardedOptimizer optimizer(sharded, *inner);
    expect_error([&] { join(sharded, {&optimizer}, [] {}); }, {"plan.reduce_gradients"});
  });
}

TEST(Join, WithNoDataAtAll) {
  run_world(3, [](World& world) {
    Joined job(world);
    join(job.sharded, {&job.optimizer}, [] {});
    join(job.sharded, {&job.optimizer}, [&] {
      if (world.rank() != 1) return;
      job.backward(0);
      job.optimizer.step();
    });
    EXPECT_EQ(job.optimizer.steps(), 1);
    job.step(0);  // training goes on as usual
  });
}

// One rank drops the gradients of the last backward, which the other has not waited for.
TEST(Join, WithGradientsThatTheLastRanksHaveDropped) {
  const Batch batch = global_batch(0, kRows, kIn, kOut);
  const auto plain = make_mlp();
  for (int rank = 0; rank < 2; ++rank) (rank_loss(*plain, batch, rank, 2, 0) / 2).backward();
  make_adamw(*plain)->step();
  for (const ShardLevel level : {ShardLevel::kNone, ShardLevel::kGradients}) {
    for (const int cleared_by : {0, 1}) {
      run_world(2, [&](World& world) {
        Joined job(world, {.level = level, .unit_bytes = 3000});
        join(job.sharded, {&job.optimizer}, [&] {
          job.backward(0);
          if (world.rank() == 0) return;
          cleared_by == 0 ? job.sharded.zero_grad() : job.optimizer.zero_grad();
        });
        EXPECT_FALSE(job.sharded.has_grad(job.net->parameters()[0]));
        job.backward(0);
        job.optimizer.step();
        expect_same_state(job.state(), plain_state(*plain), 1e-5, "after join()");
      });
    }
  }
}

TEST(Join, FailuresReachAllRanks) {
  run_world(2, [](World& world) {
    Joined job(world);
    const auto fail_on_rank_1 = [&] {
      if (world.rank() == 1) throw std::runtime_error("no more disk");
    };
    if (world.rank() == 1) {
      EXPECT_THROW(join(job.sharded, {&job.optimizer}, fail_on_rank_1), std::runtime_error);
    } else {
      expect_error([&] { join(job.sharded, {&job.optimizer}, fail_on_rank_1); },
                   {"another rank has failed"});
    }
    if (!tests_on_host()) return;  // a collective that one rank alone issues stays on its stream
    expect_error(
        [&] {
          join(job.sharded, {&job.optimizer}, [&] {
            job.backward(0);
            world.rank() == 0 ? job.optimizer.step() : job.backward(0);
          });
        },
        {"must make the same calls", "step()", "a backward"});
  });
}

TEST(Join, RefusesWhatItCanNotDo) {
  run_world(2, [](World& world) {
    const auto net = make_mlp();
    const auto inner = make_adamw(*net);
    auto sharded = fully_shard(net, {.level = ShardLevel::kGradients});
    ShardedOptimizer optimizer(sharded, *inner);
    GradScaler scaler;
    ExponentialAverage average(sharded, 0.9);
    join(sharded, {}, [&] {
      expect_error([&] { average.update(); }, {"ExponentialAverage can't be called under join()"});
      expect_error([&] { sharded.local_grad("fc0.weight"); }, {"local_grad() can't"});
      expect_error([&] { sharded.full_state(); }, {"can't be called under join()"});
      expect_error(
          [&] {
            const torch::NoGradGuard no_grad;
            net->parameters().front().zero_();
          },
          {"an operator that writes to a parameter can't be called under join()"});
      expect_error([&] { sharded.full_grad(net->parameters()[0]); }, {"full_grad() can't"});
      scaler.scale(torch::ones({}));
      expect_error([&] { scaler.unscale_(optimizer); }, {"GradScaler can't"});
      expect_error([&] { optimizer.step(); }, {"among those given to join()"});
    });
    auto freed = fully_shard(make_mlp(), {.level = ShardLevel::kParameters});
    expect_error([&] { join(freed, {}, [] {}); }, {"must stay whole", "are freed"});
  });
}

}  // namespace tessera::testing::join_test
