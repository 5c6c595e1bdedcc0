// ProcessGroups, from which World and DeviceMesh take theirs. Tests through those two:
// world_parts_test.cpp, mesh/mesh_process_group_test.cpp.
#include "comm/start/process_groups.h"

#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <tessera/comm/fake_world.h>
#include <torch/torch.h>

#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "support/models.h"

namespace tessera::process_groups_test {

using testing::expect_error;
using Ranks = std::vector<int>;

double sum_over(ProcessGroup& process_group, double value) {
  const auto number = torch::full({1}, value, torch::kDouble);
  process_group.all_reduce(number, ReduceOp::kSum, {.subject = "part"})->wait();
  return number.item<double>();
}

TEST(ProcessGroups, AreThoseOfTheDefaultWorld) {
  run_world(2, [](World& world) {
    const auto process_groups = default_process_groups();
    EXPECT_EQ(default_process_groups(), process_groups);
    EXPECT_EQ(process_groups->world(), world.process_group());
    EXPECT_EQ(process_groups->rank(), world.rank());
    EXPECT_EQ(process_groups->size(), 2);
    EXPECT_EQ(&process_groups->shared({0, 1}), &process_groups->world());
  });
  EXPECT_EQ(default_process_groups()->size(), 1);
}

// Without spawn(): a rank that is a process has one world for all its threads.
TEST(ProcessGroups, OfTheOneRankOfAProcessAreTheDefaultOfItsOtherThreads) {
  const auto find = [] {
    std::shared_ptr<ProcessGroups> found;
    std::thread([&] { found = default_process_groups(); }).join();
    return found;
  };
  const auto outer = fake_world(2, 1);
  EXPECT_EQ(find(), default_process_groups());
  EXPECT_EQ(find()->rank(), 1);
  {
    const auto newer = fake_world(4, 3);
    EXPECT_EQ(find()->size(), 4);
  }
  EXPECT_EQ(find()->world(), outer.process_group());
}

TEST(ProcessGroups, AreRefusedToThreadsOfWhichNobodyKnowsTheRank) {
  run_world(2, [](World&) {
    std::thread([] {
      expect_error([] { default_process_groups(); },
                   {"[default_process_group]", "thread", "init()"});
      // A thread that has a world of its own gets that one.
      const World own = init(c10::make_intrusive<c10d::HashStore>(), 0, 1);
      EXPECT_EQ(default_process_groups()->world(), own.process_group());
    }).join();
  });
  // Ranks that are threads without spawn().
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto rank = [&](int number, const std::function<void()>& then) {
    const World world = init(store, number, 2, {.transport = Transport::kGloo});
    EXPECT_EQ(default_process_groups()->rank(), number);
    sum_over(*world.process_group(), 1);
    then();
    sum_over(*world.process_group(), 1);
  };
  auto other = std::async(std::launch::async, [&] { rank(1, [] {}); });
  rank(0, [] {
    std::thread([] {
      expect_error([] { default_process_groups(); }, {"[default_process_group]"});
    }).join();
  });
  other.get();
}

TEST(ProcessGroups, OfARankAreThoseOfLibTorchsThreadsThatWorkForIt) {
  run_world(2, [](World& world) {
    const auto expected = default_process_groups();
    at::ThreadLocalState state;
    std::thread([&, state] {
      const at::ThreadLocalStateGuard guard(state);
      EXPECT_EQ(default_process_groups(), expected) << world.rank();
    }).join();
  });
}

TEST(ProcessGroups, AreNotTheDefaultOnesOnceTheirWorldHasGone) {
  std::shared_ptr<ProcessGroups> held;
  {
    const World world = init(c10::make_intrusive<c10d::HashStore>(), 0, 1);
    held = default_process_groups();
    EXPECT_EQ(held->world(), world.process_group());
    EXPECT_FALSE(held->closed());
  }
  EXPECT_TRUE(held->closed());
  EXPECT_NE(default_process_groups(), held);
  EXPECT_NE(default_process_group(), held->world());
}

TEST(ProcessGroups, RefuseRanksThatTheWorldDoesNotHaveAndOnesWithoutThisRank) {
  run_world(3, [](World& world) {
    const auto process_groups = default_process_groups();
    for (const Ranks& ranks : {Ranks{}, Ranks{0, 0}, Ranks{0, 3}, Ranks{-1, 0, 1, 2}})
      EXPECT_THROW(process_groups->shared(ranks), c10::ValueError) << ranks;
    const Ranks others = {(world.rank() + 1) % 3, (world.rank() + 2) % 3};
    EXPECT_THROW(process_groups->shared(others), c10::ValueError);
    expect_error([&] { process_groups->shared(others); },
                 {"[process_group]", "expected rank " + std::to_string(world.rank())});
  });
}

// One thread makes a process group of its own, another one the shared one, of the same ranks; the
// two ranks begin with different ones.
TEST(ProcessGroups, OfTheirOwnAndSharedOnesAreNotMixedUp) {
  run_world(2, [](World& world) {
    const auto process_groups = default_process_groups();
    const Ranks ranks = {1, 0};
    ProcessGroupPtr own, shared;
    const auto make_own = [&] { own = process_groups->make(ranks); };
    const auto make_shared = [&] { shared = process_groups->shared(ranks); };
    auto first =
        std::async(std::launch::async, [&] { world.rank() == 0 ? make_own() : make_shared(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    world.rank() == 0 ? make_shared() : make_own();
    first.get();
    EXPECT_NE(own, shared);
    EXPECT_EQ(process_groups->shared(ranks), shared);
    EXPECT_EQ(sum_over(*own, 1.0 + world.rank()), 3);
    EXPECT_EQ(sum_over(*shared, 10.0 + world.rank()), 21);
  });
}

}  // namespace tessera::process_groups_test
