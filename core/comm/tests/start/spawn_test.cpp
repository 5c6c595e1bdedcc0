// Ranks as threads: how they start, talk, fail and end. Their random numbers:
// rank_generator_test.cpp.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <tessera/comm/spawn.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <iterator>
#include <set>

#include "support/error_of.h"
#include "support/models.h"

namespace tessera::testing::spawn_test {

using namespace std::chrono_literals;

double sum_over_ranks(World& world, double value) {
  auto number = torch::full({1}, value, torch::kDouble);
  world.process_group()->all_reduce(number, ReduceOp::kSum, {.subject = "number"})->wait();
  return number.item<double>();
}

TEST(Spawn, RunsRanksThatFormAWorld) {
  for (const int ranks : {1, 2, 3, 4}) {
    std::mutex mutex;
    std::set<int> seen;
    spawn(ranks, [&] {
      World world = init();
      EXPECT_EQ(world.size(), ranks);
      EXPECT_EQ(world.local_rank(), world.rank());
      EXPECT_EQ(world.info().local_size, ranks);
      EXPECT_EQ(world.info().source, "spawn");
      EXPECT_EQ(default_process_group(), world.process_group());
      EXPECT_EQ(sum_over_ranks(world, world.rank()), ranks * (ranks - 1) / 2);
      const std::lock_guard lock(mutex);
      seen.insert(world.rank());
    });
    EXPECT_EQ(seen.size(), ranks);
  }
}

TEST(Spawn, RanksJoinAgainAfterTheirWorldEnded) {
  spawn(3, [] {
    for (int round = 0; round < 3; ++round) {
      World world = init();
      EXPECT_EQ(sum_over_ranks(world, 1), 3);
    }
  });
}

TEST(Spawn, AWorldThatEndsBeforeItsTensorsAreReadLeavesNoThreadAndNoDescriptor) {
  const auto run_one = [] {
    spawn(2, [] {
      World world = init();
      if (world.rank() == 0)
        world.process_group()->broadcast(torch::ones({1 << 20}), 0, {.subject = "unread"});
    });
  };
  const auto entries = [](const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder), {});
  };
  run_one();  // what LibTorch opens once
  const auto descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  run_one();
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries("/proc/self/task"), threads);
}

TEST(Spawn, MakesProcessGroupsOfSomeRanks) {
  spawn(4, [] {
    World world = init();
    const auto groups = world.hybrid_process_groups(2);
    EXPECT_EQ(groups.shard->size(), 2);
    EXPECT_EQ(groups.replicate->size(), 2);
  });
}

TEST(Spawn, SetsTheThreadsOfEachRank) {
  const int before = at::get_num_threads();
  spawn(2, [] { EXPECT_EQ(at::get_num_threads(), 3); }, {.threads_per_rank = 3});
  EXPECT_EQ(at::get_num_threads(), before);
  at::set_num_threads(4);
  spawn(2, [] { EXPECT_EQ(at::get_num_threads(), 2); });
  spawn(8, [] { EXPECT_EQ(at::get_num_threads(), 1); });
  EXPECT_EQ(at::get_num_threads(), 4);
  at::set_num_threads(before);
}

TEST(Spawn, RefusesArgumentsWithoutAMeaning) {
  const auto nothing = [] {};
  expect_error([&] { spawn(0, nothing); }, {"[spawn]", "`ranks`", "got 0"});
  expect_error([&] { spawn(1, nullptr); }, {"[spawn]", "`fn`"});
  expect_error([&] { spawn(1, nothing, {.threads_per_rank = -1}); }, {"`threads_per_rank`"});
}

TEST(Spawn, IsRefusedInARank) {
  expect_error([] { spawn(2, [] { spawn(2, [] {}); }); },
               {"[spawn]", "by a rank that was spawned", " of 2"});
}

TEST(Spawn, IsRefusedWhileAnotherRuns) {
  std::promise<void> started, end;
  std::thread other([&] {
    spawn(1, [&] {
      started.set_value();
      end.get_future().wait();
    });
  });
  started.get_future().wait();
  expect_error([] { spawn(1, [] {}); }, {"[spawn]", "only one may run at a time"});
  end.set_value();
  other.join();
  spawn(1, [] {});
}

TEST(Spawn, IsRefusedInARankOfALauncher) {
  setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  expect_error([] { spawn(2, [] {}); }, {"[spawn]", "this one is rank 1 of 2", "mpirun"});
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MASTER_ADDR"}) {
    unsetenv(name);
  }
}

TEST(Spawn, ThrowsTheFirstFailureWithItsRankAndType) {
  const auto fail = [](const auto& error) {
    spawn(3, [&] {
      World world = init();
      if (world.rank() == 1) throw error;
      sum_over_ranks(world, 1);
    });
  };
  try {
    fail(c10::ValueError({__func__, __FILE__, __LINE__}, "a bad value"));
    ADD_FAILURE() << "expected a ValueError";
  } catch (const c10::ValueError& error) {
    const std::string message = error.what_without_backtrace();
    expect_contains(message, {"a bad value", "rank 1 of 3"});
  }
  try {
    fail(std::logic_error("bad logic"));
    ADD_FAILURE() << "expected a std::runtime_error";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "[rank 1 of 3] bad logic");
  }
}

TEST(Spawn, ARankThatFailsBeforeInitEndsTheWaitOfTheOthers) {
  std::atomic<int> threads = 0, failed = 0;
  const auto join_but_one = [&] {
    if (threads++ == 0) TORCH_CHECK(false, "no data");
    try {
      World world = init();
    } catch (const c10::DistNetworkError&) {
      ++failed;
      throw;
    }
  };
  expect_error([&] { spawn(3, join_but_one); }, {"no data", "rank ", " of 3"});
  EXPECT_EQ(failed, 2);
}

TEST(Spawn, ARankThatNeverJoinsIsWaitedForUntilTheTimeout) {
  std::atomic<int> threads = 0;
  const auto join_but_one = [&] {
    if (threads++ > 0) World world = init({.timeout = 500ms});
  };
  expect_error([&] { spawn(2, join_but_one); }, {"waited 0.5 s", "to call init()"});
}

TEST(Spawn, WorksAgainAfterAFailure) {
  EXPECT_THROW(spawn(2, [] { throw std::runtime_error("no"); }), std::runtime_error);
  spawn(2, [] {
    World world = init();
    EXPECT_EQ(sum_over_ranks(world, 1), 2);
  });
}

TEST(Spawn, TrainsAsOneProcessDoes) {
  const auto run = sgd_run<Mlp>();
  const auto expected = train_alone(run, 2);
  for (const auto level : kAllLevels) {
    std::vector<std::vector<NamedTensor>> states(2);
    spawn(2, [&] {
      World world = init();
      states[world.rank()] = train_sharded(run, world, {.level = level});
    });
    for (const auto& state : states) expect_same_state(state, expected, 0, "spawned");
  }
}

}  // namespace tessera::testing::spawn_test
