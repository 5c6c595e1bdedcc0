// Offloaded units that come back to the parameters' device.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/engine/optimizer_state_dict.h>

#include "engine/model/sharded_state.h"
#include "engine/optim/sharded_optimizer_access.h"
#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera {
namespace keep_on_device_test {

using namespace testing;

constexpr int64_t kWidth = 37, kOut = 5, kAll = int64_t{1} << 40;

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Net&)>;

std::unique_ptr<torch::optim::Optimizer> make_adamw(Net& net) {
  return std::make_unique<torch::optim::AdamW>(net.parameters(),
                                               torch::optim::AdamWOptions(1e-2).amsgrad(true));
}
std::unique_ptr<torch::optim::Optimizer> make_sgd(Net& net) {
  return std::make_unique<torch::optim::SGD>(net.parameters(),
                                             torch::optim::SGDOptions(0.1).momentum(0.9));
}

struct Job {
  Job(const MakeOptimizer& make_optimizer, const ShardPlan& plan) {
    net = run.make_net();
    inner = make_optimizer(*net);
    sharded = std::make_unique<Sharded<Net>>(fully_shard(net, plan));
    optimizer = std::make_unique<ShardedOptimizer>(*sharded, *inner);
  }
  void step(World& world, int i) {
    const Batch batch = global_batch(i, run.rows, run.in, run.out);
    optimizer->zero_grad();
    rank_loss(*net, batch, world.rank(), world.size(), i).backward();
    optimizer->step();
  }
  const std::vector<std::unique_ptr<Unit>>& units() const { return sharded->state()->units(); }
  // The bytes of a unit: its master copy, and `states` tensors of the size of the updated part.
  int64_t bytes_of(const Unit& unit, int states) const {
    auto nbytes = static_cast<int64_t>(unit.master().values().nbytes());
    for (const Segment& segment : OptimizerAccess(*optimizer).segments()) {
      if (segment.place.unit == static_cast<size_t>(unit.index()))
        nbytes += states * (segment.end - segment.begin) * 4;
    }
    return nbytes;
  }
  TrainingRun run = sgd_run<Mlp>(kWidth, 3, kOut);
  std::shared_ptr<Net> net;
  std::unique_ptr<torch::optim::Optimizer> inner;
  std::unique_ptr<Sharded<Net>> sharded;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

// Three steps; units come back before the first one, or some before it and the rest after it.
enum class When { kNever, kAtStart, kInParts };

std::vector<NamedTensor> train(World& world, const MakeOptimizer& make_optimizer,
                               const ShardPlan& plan, When when) {
  Job job(make_optimizer, plan);
  if (when == When::kAtStart) job.optimizer->keep_on_device(kAll);
  if (when == When::kInParts) job.optimizer->keep_on_device(10000);
  job.step(world, 0);
  if (when == When::kInParts) {
    job.optimizer->keep_on_device(kAll);
    EXPECT_EQ(job.optimizer->keep_on_device(kAll), 0) << "all are there";
  }
  for (int i = 1; i < 3; ++i) job.step(world, i);
  return job.sharded->full_state();
}

class KeepOnDevice : public ::testing::TestWithParam<Transport> {};
INSTANTIATE_TEST_SUITE_P(Over, KeepOnDevice, ::testing::Values(Transport::kGloo, Transport::kArena),
                         [](const auto& info) {
                           return info.param == Transport::kArena ? "Arena" : "Gloo";
                         });

TEST_P(KeepOnDevice, GivesTheSameBits) {
  const ScratchDirectory directory;
  for (const auto& make_optimizer : {make_adamw, make_sgd}) {
    for (const int ranks : {1, 2, 3}) {
      const auto compare = [&](World& world) {
        for (const ShardLevel level : kAllLevels) {
          for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
            for (const auto offload : {Offload::kHost, Offload::kDirectory}) {
              const ShardPlan plan{.level = level,
                                   .partition = partition,
                                   .unit_bytes = 6000,
                                   .offload = offload,
                                   .offload_directory = directory.path_for(offload)};
              const auto expected = train(world, make_optimizer, plan, When::kNever);
              for (const When when : {When::kAtStart, When::kInParts}) {
                expect_same_state(
                    train(world, make_optimizer, plan, when), expected, 0,
                    fmt::format("{} ranks, level {}, partition {}, offload {}, {}", ranks,
                                int(level), int(partition), int(offload), int(when)));
              }
            }
          }
        }
      };
      run_world(ranks, compare, std::chrono::seconds(30), GetParam());
    }
  }
}

TEST_P(KeepOnDevice, OfModelsInHalfPrecisionGivesTheSameBits) {
  for (const ShardLevel level : kAllLevels) {
    run_world(
        2,
        [&](World& world) {
          const ShardPlan plan{.level = level,
                               .unit_bytes = 3000,
                               .precision = {.gather_dtype = at::kBFloat16},
                               .offload = Offload::kHost};
          expect_same_state(train(world, make_adamw, plan, When::kInParts),
                            train(world, make_adamw, plan, When::kNever), 0, "rounded gathers");
        },
        std::chrono::seconds(30), GetParam());
  }
}

TEST_P(KeepOnDevice, MemoryMovesFromOffloadedToMastersAndState) {
  const ScratchDirectory directory;
  for (const auto offload : {Offload::kHost, Offload::kDirectory}) {
    for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
      run_world(
          2,
          [&](World& world) {
            Job job(make_adamw, {.partition = partition,
                                 .unit_bytes = 6000,
                                 .offload = offload,
                                 .offload_directory = directory.path_for(offload)});
            ASSERT_GE(job.units().size(), 4);
            // Three tensors of state (amsgrad), none of which has been made yet.
            const int64_t first = job.bytes_of(*job.units()[0], 3);
            const int64_t second = job.bytes_of(*job.units()[1], 3);
            const ShardMemory at_start = job.optimizer->memory();
            EXPECT_EQ(job.optimizer->keep_on_device(first + second), first + second);
            for (size_t i = 0; i < job.units().size(); ++i)
              EXPECT_EQ(job.units()[i]->master().is_offloaded(),
                        i >= 2 && job.bytes_of(*job.units()[i], 3) != 0);
            job.step(world, 0);
            int64_t masters = 0, offloaded = 0;
            for (size_t i = 0; i < job.units().size(); ++i) {
              const Unit& unit = *job.units()[i];
              if (i < 2) masters += static_cast<int64_t>(unit.master().values().nbytes());
              if (i >= 2) offloaded += job.bytes_of(unit, 3);
            }
            const ShardMemory memory = job.optimizer->memory();
            EXPECT_EQ(memory.master_weights, masters);
            EXPECT_EQ(memory.optimizer_state, first + second - masters);
            EXPECT_EQ(memory.offloaded, offloaded);
            EXPECT_EQ(memory.parameters, at_start.parameters);
            // State that exists counts as much as state to come.
            const int64_t third = job.bytes_of(*job.units()[2], 3);
            EXPECT_EQ(job.optimizer->keep_on_device(third), third);
            EXPECT_EQ(job.optimizer->memory().offloaded, offloaded - third);
          },
          std::chrono::seconds(30), GetParam());
    }
  }
}

TEST(KeepOnDevice, UnitsThatDoNotFitAreLeftOutAndSmallerOnesBehindThemTaken) {
  run_world(2, [](World&) {
    Job job(make_sgd, {.unit_bytes = 6000, .offload = Offload::kHost});
    const auto units = static_cast<int>(job.units().size());
    int64_t smallest = kAll;
    int at = 0;
    for (int i = 0; i < units; ++i) {
      const int64_t nbytes = job.bytes_of(*job.units()[i], 1);
      if (nbytes < smallest) smallest = nbytes, at = i;
    }
    ASSERT_GT(at, 0) << "the first is no smaller than the others";
    EXPECT_EQ(job.optimizer->keep_on_device(0), 0);
    EXPECT_EQ(job.optimizer->keep_on_device(smallest - 1), 0);
    EXPECT_EQ(job.optimizer->keep_on_device(smallest), smallest);
    for (int i = 0; i < units; ++i) EXPECT_EQ(job.units()[i]->master().is_offloaded(), i != at);
  });
}

TEST(KeepOnDevice, RanksMayDiffer) {
  const auto train_with = [](World& world, int64_t nbytes) {
    Job job(make_adamw, {.unit_bytes = 6000, .offload = Offload::kHost});
    job.optimizer->keep_on_device(nbytes);
    for (int i = 0; i < 3; ++i) job.step(world, i);
    return job.sharded->full_state();
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
    Job trained(make_adamw, plan);
    trained.step(world, 0);
    const auto state = full_state_dict(*trained.optimizer, -1);
    Job job(make_adamw, plan);
    job.optimizer->keep_on_device(job.bytes_of(*job.units()[0], 3));
    job.sharded->load_full_state(trained.sharded->full_state());
    load_full_state_dict(*job.optimizer, state);
    const auto memory = job.optimizer->memory();
    EXPECT_EQ(memory.master_weights + memory.optimizer_state, job.bytes_of(*job.units()[0], 3));
    trained.step(world, 1);
    job.step(world, 1);
    expect_same_state(job.sharded->full_state(), trained.sharded->full_state(), 0, "loaded");
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
  run_world(2, [](World&) {
    Job job(make_adamw, {});
    expect_error([&] { job.optimizer->keep_on_device(100); },
                 {"[keep_on_device] the plan must offload", "got Offload::kNone"});
    Job offloaded(make_adamw, {.offload = Offload::kHost});
    expect_error([&] { offloaded.optimizer->keep_on_device(-1); },
                 {"[keep_on_device]", "must not be negative; got -1"});
  });
}

}  // namespace keep_on_device_test
}  // namespace tessera
