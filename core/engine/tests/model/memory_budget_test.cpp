// A budget in bytes for everything, and the residency that it gives.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/trace/memory_tracer.h>

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "support/counted_job.h"
#include "support/error_of.h"

namespace tessera::testing::memory_budget_test {

using enum MemoryEvent;

constexpr int64_t kWidth = 96, kLayers = 7, kUnit = kWidth * kWidth * 4;

// Equal layers, one unit each. Only the first one learns: backward gathers all others for it, and
// memory beside gathered parameters hardly changes before its gradient comes.
struct MostlyFrozen : Net {
  MostlyFrozen() {
    for (int64_t i = 0; i < kLayers; ++i) {
      fcs.push_back(
          register_module("fc" + std::to_string(i),
                          torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false))));
      if (i > 0) fcs.back()->weight.requires_grad_(false);
    }
  }
  torch::Tensor forward(torch::Tensor x) override {
    for (auto& fc : fcs) x = torch::tanh(fc->forward(x));
    return x;
  }
  std::vector<torch::nn::Linear> fcs;
};

struct Job : CountedJob<MostlyFrozen> {
  Job(World& world, ShardPlan plan, bool is_adam = false)
      : CountedJob(training(is_adam), world, each_a_unit(plan)) {}
  static TrainingRun training(bool is_adam) {
    TrainingRun run = sgd_run<MostlyFrozen>();
    run.make_optimizer = [=](Net& net) -> std::unique_ptr<torch::optim::Optimizer> {
      const std::vector<torch::Tensor> learns = {static_cast<MostlyFrozen&>(net).fcs[0]->weight};
      if (is_adam)
        return std::make_unique<torch::optim::AdamW>(learns, torch::optim::AdamWOptions());
      return std::make_unique<torch::optim::SGD>(learns, torch::optim::SGDOptions(0.1));
    };
    return run;
  }
  static ShardPlan each_a_unit(ShardPlan plan) {
    plan.unit_bytes = 0;
    return plan;
  }
  void step(int i, int64_t rows = 2) {
    const torch::Tensor x = global_batch(i, rows, kWidth, 1).x;
    optimizer.zero_grad();
    net->forward(x).square().mean().backward();
    optimizer.step();
    let_gradients_go();
  }
  // Slow peers read gradients of this step until far into the next one, where they count, too.
  void let_gradients_go() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (const auto& gradients : sharded.state()->reducer().gradients()) {
      while (gradients->in_flight_nbytes() > 0) {
        ASSERT_LT(std::chrono::steady_clock::now(), deadline);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
  // All-gathers of a step, including those by which ranks agree.
  int64_t calls_of_a_step(int i) {
    reset_counts();
    step(i);
    return shard->counts().all_gather.calls;
  }
  // Gathers of units only. The first one happens at the end of the previous step.
  int64_t gathers_of_a_step(int i) {
    const MemoryTracer tracer(sharded);
    for (int j = i; j < i + 2; ++j) step(j);
    return std::count_if(tracer.samples().begin(), tracer.samples().end(),
                         [](const MemorySample& sample) {
                           return sample.event == kGatherStarted && sample.step == 1;
                         });
  }
  Residency& residency() { return sharded.state()->residency(); }
};

int64_t most_of(const MemorySample& sample) { return sample.bytes.model() + sample.peak_other; }

// The most memory beside gathered parameters, from the begin of forward to the first gradient.
int64_t beside_gathered(const MemoryTracer& tracer) {
  int64_t most = 0;
  bool in_pass = false;
  for (const MemorySample& sample : tracer.samples()) {
    if (sample.event == kForwardBegin) in_pass = true;
    if (sample.event == kBackwardBegin) in_pass = false;
    if (in_pass && sample.step > 0) most = std::max(most, most_of(sample) - sample.bytes.gathered);
  }
  return most;
}

// Measures that memory without a budget, on the rank that needs most. Where ranks wait for each
// other, messages live longer and add to it: the least of several runs is that of the model alone.
int64_t measure_rest(int ranks, int prefetch, bool is_adam = false) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int run = 0; run < 3; ++run) {
    std::vector<int64_t> rest(ranks);
    run_world(ranks, [&](World& world) {
      Job job(world, {.prefetch = prefetch}, is_adam);
      const MemoryTracer tracer(job.sharded);
      for (int i = 0; i < 4; ++i) job.step(i);
      rest[world.rank()] = beside_gathered(tracer);
    });
    least = std::min(least, *std::max_element(rest.begin(), rest.end()));
  }
  return least;
}

// The fewest gathers for an order if `capacity` units may be gathered at once: tries all choices of
// the unit to free.
size_t fewest_gathers(const UseOrder& order, size_t capacity) {
  std::map<std::set<int>, size_t> reached = {{{}, 0}};
  const auto keep = [](auto& states, const std::set<int>& units, size_t gathers) {
    const auto [it, is_new] = states.try_emplace(units, gathers);
    if (!is_new) it->second = std::min(it->second, gathers);
  };
  for (const int unit : order) {
    std::map<std::set<int>, size_t> next;
    for (const auto& [units, gathers] : reached) {
      if (units.contains(unit)) {
        keep(next, units, gathers);
        continue;
      }
      std::set<int> grown = units;
      grown.insert(unit);
      if (grown.size() <= capacity) {
        keep(next, grown, gathers + 1);
        continue;
      }
      for (const int victim : units) {
        std::set<int> shrunk = grown;
        shrunk.erase(victim);
        keep(next, shrunk, gathers + 1);
      }
    }
    reached = next;
  }
  size_t fewest = SIZE_MAX;
  for (const auto& [units, gathers] : reached) fewest = std::min(fewest, gathers);
  return fewest;
}

class MemoryBudgets : public ::testing::TestWithParam<int> {
 protected:
  int ranks() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, MemoryBudgets, ::testing::Values(2, 3));

TEST_P(MemoryBudgets, AsManyUnitsStayAsFitAndGathersAreTheFewestPossible) {
  const int64_t rest = measure_rest(ranks(), 0);
  for (const int64_t k : {2, 3, 4}) {
    run_world(ranks(), [&](World& world) {
      const int64_t budget = rest + kUnit + k * kUnit + kUnit / 2;
      Job job(world, {.memory_budget = budget, .prefetch = 0});
      for (int i = 0; i < 3; ++i) job.step(i);
      EXPECT_EQ(job.residency().resident_bytes() / kUnit, k) << "budget " << budget;
      const auto order = job.residency().order().joined();
      ASSERT_EQ(static_cast<int64_t>(order.size()), 2 * kLayers - 2);
      EXPECT_EQ(job.gathers_of_a_step(3), static_cast<int64_t>(fewest_gathers(order, k + 1)));
      EXPECT_LE(job.sharded.memory().peak_unsharded, (k + 1) * kUnit);
      // All memory stays within the budget, too.
      const MemoryTracer tracer(job.sharded);
      for (int i = 5; i < 7; ++i) job.step(i);
      int64_t most_gathered = 0;
      for (const MemorySample& sample : tracer.samples()) {
        most_gathered = std::max(most_gathered, sample.bytes.gathered);
        EXPECT_LE(most_of(sample), budget) << memory_event_name(sample.event);
      }
      EXPECT_EQ(most_gathered, (k + 1) * kUnit);
    });
  }
}

// Adam's state, of at least 2/3 of a unit on each rank, is not there in the pass that is measured.
TEST_P(MemoryBudgets, TheFirstChoiceLeavesRoomForTheStateThatTheFirstStepMakes) {
  const int64_t rest = measure_rest(ranks(), 0, /*is_adam=*/true);
  run_world(ranks(), [&](World& world) {
    const int64_t budget = rest + kUnit + 3 * kUnit + kUnit / 2;
    Job job(world, {.memory_budget = budget, .prefetch = 0}, /*is_adam=*/true);
    job.step(0);
    EXPECT_EQ(job.residency().resident_bytes() / kUnit, 3);
  });
}

TEST_P(MemoryBudgets, WithPrefetchTheUnitsAheadCountToo) {
  const int64_t rest = measure_rest(ranks(), 1);
  run_world(ranks(), [&](World& world) {
    Job job(world, {.memory_budget = rest + 2 * kUnit + 3 * kUnit + kUnit / 2, .prefetch = 1});
    for (int i = 0; i < 4; ++i) job.step(i);
    EXPECT_EQ(job.residency().resident_bytes() / kUnit, 3);
    EXPECT_LE(job.sharded.memory().peak_unsharded, 5 * kUnit);
  });
}

// There is room for the unit in use and one ahead in forward, and in backward, where a gradient is
// on its way besides, perhaps for that in use alone.
TEST_P(MemoryBudgets, WithoutRoomForAllThatPrefetchAsksFewerUnitsAreGatheredAhead) {
  const int64_t rest = measure_rest(ranks(), 0);
  run_world(ranks(), [&](World& world) {
    Job job(world, {.memory_budget = rest + 3 * kUnit - kUnit / 8, .prefetch = 2});
    for (int i = 0; i < 3; ++i) job.step(i);
    const MemoryTracer tracer(job.sharded);
    for (int i = 3; i < 5; ++i) job.step(i);
    int64_t most_gathered = 0;
    for (const MemorySample& sample : tracer.samples())
      most_gathered = std::max(most_gathered, sample.bytes.gathered);
    EXPECT_GE(most_gathered, kUnit);
    EXPECT_LE(most_gathered, 2 * kUnit) << "rest " << rest;
  });
}

TEST_P(MemoryBudgets, WhatFitsWholeIsGatheredOnce) {
  run_world(ranks(), [&](World& world) {
    Job job(world, {.memory_budget = int64_t{1} << 30});
    job.step(0);
    EXPECT_EQ(job.residency().resident_bytes(), -1);
    job.step(1);
    EXPECT_EQ(job.calls_of_a_step(2), kLayers);
    EXPECT_EQ(job.sharded.memory().peak_unsharded, kLayers * kUnit);
  });
}

TEST_P(MemoryBudgets, TheSmallestOfTheRanksBudgetsCounts) {
  const int64_t rest = measure_rest(ranks(), 0);
  run_world(ranks(), [&](World& world) {
    const int64_t k = world.rank() == 1 ? 3 : 5;
    Job job(world, {.memory_budget = rest + kUnit + k * kUnit + kUnit / 2, .prefetch = 0});
    for (int i = 0; i < 3; ++i) job.step(i);
    EXPECT_EQ(job.residency().resident_bytes() / kUnit, 3);
  });
}

TEST_P(MemoryBudgets, ABudgetThatIsTooSmallFailsOnEveryRankAndSaysWhatIsNeeded) {
  std::vector<std::string> errors(ranks());
  run_world(ranks(), [&](World& world) {
    // Only one rank has too little.
    Job job(world, {.memory_budget = world.rank() == 1 ? 30000 : 1 << 30});
    try {
      job.step(0, 200);
    } catch (const c10::Error& error) {
      errors[world.rank()] = error.what_without_backtrace();
    }
  });
  EXPECT_NE(errors[0], "");
  for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
  for (const char* part : {"[memory_budget]", "rank 1 needs", "has 30000", "plan.memory_budget",
                           "unit 'fc", "parameters", "gradients", "optimizer state", "activations"})
    expect_contains(errors[0], {part});
}

TEST(MemoryBudgets, ArgumentsAreChecked) {
  run_world(2, [](World&) {
    const auto net = std::make_shared<MostlyFrozen>();
    expect_error([&] { fully_shard(net, {.memory_budget = 0}); }, {"memory_budget", "got 0"});
    expect_error([&] { fully_shard(net, {.resident_bytes = -1, .memory_budget = 1 << 20}); },
                 {"memory_budget", "resident_bytes", "-1"});
    EXPECT_EQ(state_of(*net), nullptr);
  });
}

// A larger batch later: the choice is made again, and if no choice fits, training continues.
TEST(MemoryBudgets, ALaterPassThatNeedsMoreMakesTheChoiceAgain) {
  const int64_t rest = measure_rest(2, 0);
  run_world(2, [&](World& world) {
    Job job(world, {.memory_budget = rest + 5 * kUnit + kUnit / 2, .prefetch = 0});
    for (int i = 0; i < 3; ++i) job.step(i);
    EXPECT_EQ(job.residency().resident_bytes() / kUnit, 4);
    // Each layer keeps 384 bytes per row: 8 more rows need more than the half unit that was left.
    const int64_t rows = world.rank() == 1 ? 10 : 2;
    for (int i = 3; i < 6; ++i) job.step(i, rows);
    const int64_t fewer = job.residency().resident_bytes() / kUnit;
    EXPECT_EQ(fewer, 3);
    for (int i = 6; i < 9; ++i) job.step(i, 500);
    EXPECT_EQ(job.residency().resident_bytes() / kUnit, 0);
    const int64_t gathers = job.gathers_of_a_step(9);
    EXPECT_EQ(gathers, static_cast<int64_t>(fewest_gathers(job.residency().order().joined(), 1)));
  });
}

// The limit that a budget leads to; none if it was too small.
std::optional<int64_t> train_with(const TrainingRun& run, World& world, int64_t budget,
                                  const std::vector<NamedTensor>& expected) {
  ShardedJob job(run, world, {.unit_bytes = 6000, .memory_budget = budget});
  for (int step = 0; step < run.steps; ++step) {
    job.optimizer.zero_grad();
    job.backward(step);
    try {
      job.optimizer.step();
    } catch (const c10::Error& error) {
      EXPECT_EQ(step, 0) << error.what_without_backtrace();
      return std::nullopt;
    }
  }
  expect_same_state(job.state(), expected, tolerance_of(world.size()),
                    fmt::format("budget {}", budget));
  return job.sharded.state()->residency().resident_bytes();
}

TEST(MemoryBudgets, ResultsAreTheSameBitsWhateverTheBudget) {
  const TrainingRun run = sgd_run<Mlp>(37, 4, 5);
  for (const int ranks : {1, 2, 3}) {
    const auto expected = train_alone(run, ranks);
    std::set<std::optional<int64_t>> limits;
    for (int64_t budget = 30000; budget <= 110000; budget += 2500) {
      run_world(ranks, [&](World& world) {
        const auto limit = train_with(run, world, budget, expected);
        if (world.rank() == 0) limits.insert(limit);
      });
    }
    EXPECT_TRUE(limits.contains(std::nullopt));
    EXPECT_TRUE(limits.contains(-1));
    // With one rank there is nothing to gather.
    EXPECT_GE(limits.size(), ranks == 1 ? 2 : 3);
  }
}

TEST(MemoryBudgets, OnOneHostWithSharedMemoryNothingIsFreedAndTheBudgetIsOnlyChecked) {
  TESSERA_ON_HOST_ONLY("parameters in shared memory");
  run_arena(2, [&](World& world) {
    Job job(world, {.memory_budget = int64_t{1} << 30});
    for (int i = 0; i < 3; ++i) job.step(i);
    EXPECT_EQ(job.sharded.memory().peak_unsharded, 0);
    Job small(world, {.memory_budget = 20000});
    expect_error([&] { small.step(0); }, {"memory_budget", "gathered parameters 0"});
  });
}

TEST(MemoryBudgets, AccumulationAndATracerBesideIt) {
  run_world(2, [&](World& world) {
    ShardedJob job(run_by<Mlp, torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3), 37, 4, 5),
                   world, {.unit_bytes = 6000, .memory_budget = 150000});
    const MemoryTracer tracer(job.sharded);
    for (int step = 0; step < 4; ++step) {
      job.optimizer.zero_grad();
      for (int part = 0; part < 2; ++part) job.backward_without_sync(part);
      job.backward(2);
      job.optimizer.step();
    }
    EXPECT_NE(job.sharded.state()->residency().resident_bytes(), 0);
    int64_t most = 0;
    for (const MemorySample& sample : tracer.samples()) {
      if (sample.step >= 2) most = std::max(most, most_of(sample));
    }
    EXPECT_LE(most, 150000);
  });
}

}  // namespace tessera::testing::memory_budget_test
