// Offloaded units that come back to the parameters' device.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/engine/optimizer_state_dict.h>

#include "engine/model/sharded_state.h"
#include "engine/optim/sharded_optimizer_access.h"
#include "support/scratch_directory.h"
#include "support/sharded_job.h"

namespace tessera::testing::keep_on_device_test {

constexpr int64_t kWidth = 37, kOut = 5, kAll = int64_t{1} << 40;

TrainingRun adamw() {
  return run_by<Mlp, torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).amsgrad(true), kWidth, 3,
                                          kOut);
}
TrainingRun sgd() { return sgd_run<Mlp>(kWidth, 3, kOut); }

struct Job : ShardedJob<> {
  Job(World& world, const TrainingRun& run, const ShardPlan& plan)
      : ShardedJob(run, world, plan, {}) {}
  const std::vector<std::unique_ptr<Unit>>& units() const { return sharded.state()->units(); }
  // The bytes of a unit: its master copy, and `states` tensors of the size of the updated part.
  int64_t bytes_of(const Unit& unit, int states) const {
    auto nbytes = static_cast<int64_t>(unit.master().values().nbytes());
    for (const Segment& segment : OptimizerAccess(optimizer).segments()) {
      if (segment.place.unit == static_cast<size_t>(unit.index()))
        nbytes += states * (segment.end - segment.begin) * 4;
    }
    return nbytes;
  }
};

// Three steps; units come back before the first one, or some before it and the rest after it.
enum class When { kNever, kAtStart, kInParts };

State train(World& world, const TrainingRun& run, const ShardPlan& plan, When when) {
  Job job(world, run, plan);
  if (when == When::kAtStart) job.optimizer.keep_on_device(kAll);
  if (when == When::kInParts) job.optimizer.keep_on_device(10000);
  job.step(0);
  if (when == When::kInParts) {
    job.optimizer.keep_on_device(kAll);
    EXPECT_EQ(job.optimizer.keep_on_device(kAll), 0) << "all are there";
  }
  job.train(1, 3);
  return job.state();
}

class KeepOnDevice : public ::testing::TestWithParam<Transport> {};
INSTANTIATE_TEST_SUITE_P(Over, KeepOnDevice, ::testing::ValuesIn(kTransports), transport_of_test);

TEST_P(KeepOnDevice, GivesTheSameBits) {
  const ScratchDirectory directory;
  for (const TrainingRun& run : {adamw(), sgd()}) {
    for (const auto offload : {Offload::kHost, Offload::kDirectory}) {
      on_worlds(
          {1, 2, 3},
          with_each_partition({.unit_bytes = 6000,
                               .offload = offload,
                               .offload_directory = directory.path_for(offload)}),
          [&](World& world, const ShardPlan& plan) {
            const State expected = train(world, run, plan, When::kNever);
            for (const When when : {When::kAtStart, When::kInParts})
              expect_same_state(train(world, run, plan, when), expected, 0,
                                fmt::format("{}", int(when)));
          },
          GetParam());
    }
  }
}

TEST_P(KeepOnDevice, OfModelsInHalfPrecisionGivesTheSameBits) {
  on_worlds(
      {2},
      at_each_level({.unit_bytes = 3000,
                     .precision = {.gather_dtype = at::kBFloat16},
                     .offload = Offload::kHost}),
      [&](World& world, const ShardPlan& plan) {
        expect_same_state(train(world, adamw(), plan, When::kInParts),
                          train(world, adamw(), plan, When::kNever), 0, "rounded gathers");
      },
      GetParam());
}

TEST_P(KeepOnDevice, MemoryMovesFromOffloadedToMastersAndState) {
  const ScratchDirectory directory;
  for (const auto offload : {Offload::kHost, Offload::kDirectory}) {
    for (const auto partition : kPartitions) {
      run_over(GetParam(), 2, [&](World& world) {
        Job job(world, adamw(),
                {.partition = partition,
                 .unit_bytes = 6000,
                 .offload = offload,
                 .offload_directory = directory.path_for(offload)});
        ASSERT_GE(job.units().size(), 4);
        // Three tensors of state (amsgrad), none of which has been made yet.
        const int64_t first = job.bytes_of(*job.units()[0], 3);
        const int64_t second = job.bytes_of(*job.units()[1], 3);
        const ShardMemory at_start = job.optimizer.memory();
        EXPECT_EQ(job.optimizer.keep_on_device(first + second), first + second);
        for (size_t i = 0; i < job.units().size(); ++i)
          EXPECT_EQ(job.units()[i]->master().is_offloaded(),
                    i >= 2 && job.bytes_of(*job.units()[i], 3) != 0);
        job.step(0);
        int64_t masters = 0, offloaded = 0;
        for (size_t i = 0; i < job.units().size(); ++i) {
          const Unit& unit = *job.units()[i];
          if (i < 2) masters += static_cast<int64_t>(unit.master().values().nbytes());
          if (i >= 2) offloaded += job.bytes_of(unit, 3);
        }
        const ShardMemory memory = job.optimizer.memory();
        EXPECT_EQ(memory.master_weights, masters);
        EXPECT_EQ(memory.optimizer_state, first + second - masters);
        EXPECT_EQ(memory.offloaded, offloaded);
        EXPECT_EQ(memory.parameters, at_start.parameters);
        // State that exists counts as much as state to come.
        const int64_t third = job.bytes_of(*job.units()[2], 3);
        EXPECT_EQ(job.optimizer.keep_on_device(third), third);
        EXPECT_EQ(job.optimizer.memory().offloaded, offloaded - third);
      });
    }
  }
}

TEST(KeepOnDevice, UnitsThatDoNotFitAreLeftOutAndSmallerOnesBehindThemTaken) {
  run_world(2, [](World& world) {
    Job job(world, sgd(), {.unit_bytes = 6000, .offload = Offload::kHost});
    const auto units = static_cast<int>(job.units().size());
    int64_t smallest = kAll;
    int at = 0;
    for (int i = 0; i < units; ++i) {
      const int64_t nbytes = job.bytes_of(*job.units()[i], 1);
      if (nbytes < smallest) smallest = nbytes, at = i;
    }
    ASSERT_GT(at, 0) << "the first is no smaller than the others";
    EXPECT_EQ(job.optimizer.keep_on_device(0), 0);
    EXPECT_EQ(job.optimizer.keep_on_device(smallest - 1), 0);
    EXPECT_EQ(job.optimizer.keep_on_device(smallest), smallest);
    for (int i = 0; i < units; ++i) EXPECT_EQ(job.units()[i]->master().is_offloaded(), i != at);
  });
}

TEST(KeepOnDevice, RanksMayDiffer) {
  const auto train_with = [](World& world, int64_t nbytes) {
    Job job(world, adamw(), {.unit_bytes = 6000, .offload = Offload::kHost});
    job.optimizer.keep_on_device(nbytes);
    job.train(0, 3);
    return job.state();
  };
  run_world(3, [&](World& world) {
    const auto expected = train_with(world, 0);
    expect_same_state(train_with(world, world.rank() * 20000), expected, 0, "different numbers");
  });
}

TEST(KeepOnDevice, StateThatIsLoadedGoesWhereItsUnitIs) {
  const ScratchDirectory directory;
  run_world(2, [&](World& world) {
    const ShardPlan plan{
        .unit_bytes = 6000, .offload = Offload::kDirectory, .offload_directory = directory.path()};
    Job trained(world, adamw(), plan);
    trained.step(0);
    const auto state = full_state_dict(trained.optimizer, -1);
    Job job(world, adamw(), plan);
    job.optimizer.keep_on_device(job.bytes_of(*job.units()[0], 3));
    job.sharded.load_full_state(trained.state());
    load_full_state_dict(job.optimizer, state);
    const auto memory = job.optimizer.memory();
    EXPECT_EQ(memory.master_weights + memory.optimizer_state, job.bytes_of(*job.units()[0], 3));
    trained.step(1);
    job.step(1);
    expect_same_state(job.state(), trained.state(), 0, "loaded");
  });
}

TEST(KeepOnDevice, UnitsThatAnotherOptimizerUpdatesStayOffloaded) {
  run_world(2, [](World& world) {
    const auto train_with = [&](int64_t nbytes) {
      const auto net = seeded(7, [] { return std::make_shared<Mlp>(kWidth, 3, kOut); });
      auto params = net->parameters();
      const std::vector<torch::Tensor> tail(params.end() - 1, params.end());
      params.pop_back();
      torch::optim::AdamW most(params, torch::optim::AdamWOptions(1e-2));
      torch::optim::SGD rest(tail, torch::optim::SGDOptions(0.1));
      auto sharded = fully_shard(net, {.unit_bytes = 6000, .offload = Offload::kHost});
      ShardedOptimizer first(sharded, most), second(sharded, rest);
      const int64_t kept = first.keep_on_device(nbytes);
      EXPECT_EQ(kept > 0, nbytes > 0);
      const auto& units = sharded.state()->units();
      // Rank 1 has a part of the last parameter.
      EXPECT_TRUE(world.rank() == 0 || units.back()->master().is_offloaded());
      EXPECT_EQ(units.front()->master().is_offloaded(), nbytes == 0);
      const Batch batch = global_batch(0, 12, kWidth, kOut);
      rank_loss(*net, batch, world.rank(), 2, 0).backward();
      first.step();
      second.step();
      return sharded.full_state();
    };
    const auto expected = train_with(0);
    expect_same_state(train_with(kAll), expected, 0, "two optimizers");
  });
}

TEST(KeepOnDevice, NeedsSomethingThatIsOffloaded) {
  run_world(2, [](World& world) {
    Job job(world, adamw(), {});
    expect_error([&] { job.optimizer.keep_on_device(100); },
                 {"[keep_on_device] the plan must offload", "got Offload::kNone"});
    Job offloaded(world, adamw(), {.offload = Offload::kHost});
    expect_error([&] { offloaded.optimizer.keep_on_device(-1); },
                 {"[keep_on_device]", "must not be negative; got -1"});
  });
}

}  // namespace tessera::testing::keep_on_device_test
