// Behaviour of the arena beyond the contract of all process groups.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>
#include <vector>

#include "support/error_of.h"
#include "support/models.h"
#include "support/shared_memory_of.h"

namespace tessera::testing::arena_test {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr CollectiveTag kTag{.subject = "arena", .channel = Channel::kGrads};

void run_both(int ranks, const std::function<torch::Tensor(World&)>& fn) {
  std::vector<torch::Tensor> arena(ranks), gloo(ranks);
  run_arena(ranks, [&](World& world) { arena[world.rank()] = fn(world); });
  run_over(Transport::kGloo, ranks, [&](World& world) { gloo[world.rank()] = fn(world); });
  for (int rank = 0; rank < ranks; ++rank) EXPECT_TRUE(torch::equal(arena[rank], gloo[rank]));
}

TEST(Arena, IsChosenByItselfOnOneHost) {
  spawn(2, [] {
    const auto world = init();
    EXPECT_EQ(world.process_group()->backend_name(), "arena");
    EXPECT_EQ(world.new_process_group({1, 0})->backend_name(), "arena");
    EXPECT_TRUE(world.process_group()->sends_to().empty());
  });
  run_over(Transport::kGloo, 2,
           [](World& world) { EXPECT_EQ(world.process_group()->backend_name(), "gloo"); });
}

TEST(Arena, SumsHaveTheBitsOfGloo) {
  for (const int ranks : {2, 3, 4}) {
    run_both(ranks, [&](World& world) {
      const auto flat = seeded(world.rank(), [] { return torch::randn({300'007}); });
      const std::vector<int64_t> parts = [&] {
        std::vector<int64_t> bounds{0};
        for (int r = 1; r <= ranks; ++r) bounds.push_back(300'007 * r / ranks);
        return bounds;
      }();
      const int rank = world.rank();
      auto out = torch::empty({parts[rank + 1] - parts[rank]});
      world.process_group()
          ->reduce_scatter(out, {{0, flat, flat.numel()}}, parts, {.scale = 1.0 / 3}, kTag)
          ->wait();
      auto large = flat.clone(), small = flat.slice(0, 0, 100).clone();
      world.process_group()->all_reduce(large, ReduceOp::kSum, kTag)->wait();
      world.process_group()->all_reduce(small, ReduceOp::kSum, kTag)->wait();
      return torch::cat({out, large, small});
    });
  }
}

TEST(Arena, WhatIsShownIsKeptUntilItIsRead) {
  run_arena(3, [](World& world) {
    const std::vector<int64_t> bounds{0, 100'000, 200'000, 300'000};
    std::vector<torch::Tensor> outs;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 20; ++i) {
      // Another rank is late each time: memory freed too early would be overwritten by then.
      if (world.rank() == i % 3) std::this_thread::sleep_for(milliseconds(3));
      outs.push_back(torch::empty({100'000}));
      works.push_back(world.process_group()->reduce_scatter(
          outs.back(), {{0, torch::full({300'000}, 1.F * i + world.rank()), 300'000}}, bounds, {},
          kTag));
    }
    for (const auto& work : works) work->wait();
    for (int i = 0; i < 20; ++i) EXPECT_TRUE((outs[i] == 3 * i + 3).all().item<bool>()) << i;
  });
}

TEST(Arena, ManyCollectivesMayBeUnderWay) {
  run_arena(2, [](World& world) {
    std::vector<torch::Tensor> sums;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 200; ++i) {
      sums.push_back(torch::full({3}, i + world.rank()));
      works.push_back(world.process_group()->all_reduce(sums.back(), ReduceOp::kSum, kTag));
    }
    for (auto it = works.rbegin(); it != works.rend(); ++it) (*it)->wait();
    for (int i = 0; i < 200; ++i) EXPECT_EQ(sums[i][2].item<int>(), 2 * i + 1);
    // More collectives than there are slots, one after another.
    for (int i = 0; i < 1000; ++i) world.process_group()->barrier(kTag);
  });
}

TEST(Arena, AWaitServesTheCollectivesThatOthersWaitFor) {
  run_arena(2, [](World& world) {
    auto first = torch::full({100'000}, 5.F), second = torch::full({100'000}, 7.F);
    auto& group = *world.process_group();
    if (world.rank() == 0) {
      group.broadcast(first, 0, kTag)->wait();  // rank 1 reads it while it waits for `second`
      group.broadcast(second, 1, kTag)->wait();
    } else {
      first.zero_();
      const auto work = group.broadcast(first, 0, kTag);
      group.broadcast(second, 1, kTag)->wait();
      work->wait();
    }
    EXPECT_EQ(first[99'999].item<float>(), 5);
  });
}

TEST(Arena, RanksThatDisagreeAreToldWhatTheOtherDid) {
  std::vector<std::string> errors(2);
  run_arena(2, [&](World& world) {
    auto& group = *world.process_group();
    const auto tensor = torch::ones({world.rank() == 0 ? 3 : 4});
    const CollectiveTag tag{.subject = world.rank() == 0 ? "left" : "right"};
    try {
      group.all_reduce(tensor, ReduceOp::kSum, tag)->wait();
    } catch (const c10::DistBackendError& error) {
      errors[world.rank()] = error.what_without_backtrace();
    }
  });
  expect_contains(errors[0], {"rank 1 issued another collective"});
  expect_contains(errors[0], {"all_reduce of unit 'right'"});
  expect_contains(errors[1], {"all_reduce of unit 'left'"});
}

// A sender may free its messages at once; receivers get the values of the time of sending.
TEST(Arena, MessagesAreReadWhereTheyAreAndKeptUntilThen) {
  run_arena(3, [](World& world) {
    const int rank = world.rank();
    std::vector<std::vector<torch::Tensor>> received;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 20; ++i) {
      if (rank == i % 3) std::this_thread::sleep_for(milliseconds(3));
      std::vector<torch::Tensor> to, from;
      for (int r = 0; r < 3; ++r) {
        to.push_back(torch::full({100'000 + r}, 1.F * 9 * i + 3 * rank + r));
        from.push_back(torch::empty({100'000 + rank}));
      }
      received.push_back(from);
      works.push_back(world.process_group()->all_to_all(std::move(from), std::move(to), kTag));
    }
    for (const auto& work : works) work->wait();
    for (int i = 0; i < 20; ++i) {
      for (int r = 0; r < 3; ++r)
        EXPECT_TRUE((received[i][r] == 9 * i + 3 * r + rank).all().item<bool>()) << i << ' ' << r;
    }
  });
}

TEST(Arena, RanksThatDisagreeOnAMessageAreNamedOnAllRanks) {
  run_arena(3, [](World& world) {
    auto& group = *world.process_group();
    const auto exchange = [&](int64_t sent, int64_t expected) {
      std::vector<torch::Tensor> from(3), to(3);
      if (world.rank() == 0) to[2] = torch::ones({sent});
      if (world.rank() == 2) from[0] = torch::zeros({expected});
      group.all_to_all(from, to, kTag)->wait_inputs();
      if (world.rank() != 2) return;
      EXPECT_EQ(from[0].sum().item<double>(), static_cast<double>(sent));
    };
    for (int i = 0; i < 300; ++i) {  // more than there are slots: a failure keeps none
      expect_error([&] { exchange(5, 4); },
                   {"[all_to_all] unit 'arena'",
                    "rank 0 sends 5 elements of Float to rank 2, which expects 4 elements of"});
      exchange(5, 5);
    }
    expect_error([&] { exchange(0, 4); }, {"rank 0 sends nothing to rank 2, which expects 4"});
    expect_error([&] { exchange(7, 0); }, {"rank 0 sends 7", "to rank 2, which expects nothing"});
  });
}

TEST(Arena, ARankThatLeavesIsNamedByThoseWhoNeedIt) {
  std::vector<std::string> errors(3);
  try {
    run_arena(3, [&](World& world) {
      TORCH_CHECK(world.rank() != 1, "rank 1 gives up");
      try {
        world.process_group()->barrier(kTag);
      } catch (const c10::DistBackendError& error) {
        errors[world.rank()] = error.what_without_backtrace();
        throw;
      }
    });
    ADD_FAILURE() << "no rank failed";
  } catch (const c10::Error& error) {
    expect_contains(error.what(), {"rank 1 gives up"});
  }
  for (const int rank : {0, 2}) expect_contains(errors[rank], {"for rank 1 and failed"});
}

TEST(Arena, ARankThatHasDoneItsPartMayLeave) {
  run_arena(3, [](World& world) {
    auto& group = *world.process_group();
    const auto work = group.arrive(kTag);
    if (world.rank() == 1) return;
    if (world.rank() == 2) std::this_thread::sleep_for(milliseconds(300));
    work->wait();
    const auto sum = group.arrive(CollectiveTag{.subject = "too late"});
    EXPECT_THROW(sum->wait(), c10::DistBackendError);
  });
}

TEST(Arena, ALateRankIsNamedWhenTheTimeoutPasses) {
  run_arena(
      2,
      [](World& world) {
        auto& group = *world.process_group();
        if (world.rank() == 1) {
          std::this_thread::sleep_for(milliseconds(1500));
          return;
        }
        expect_error([&] { group.barrier(kTag); }, {"[barrier]", "arena", "for rank 1", "timeout"});
      },
      milliseconds(700));
}

TEST(Arena, SharedMemoryIsOneForAllRanks) {
  run_arena(2, [](World& world) {
    auto& group = *world.process_group();
    const auto buffer = shared_memory_of(group).share(1000, kTag);
    ASSERT_TRUE(buffer);
    const auto flat = buffer->bytes.view(torch::kFloat);
    const std::vector<int64_t> bounds{0, 100, 250};
    const auto shard = flat.slice(0, bounds[world.rank()], bounds[world.rank() + 1]);
    shard.fill_(3 + world.rank());
    group.all_gather(flat, shard, bounds, kTag)->wait();
    const auto seen = buffer->read_only.view(torch::kFloat);
    EXPECT_EQ(seen.sum().item<float>(), 3 * 100 + 4 * 150);
    EXPECT_NE(seen.data_ptr(), flat.data_ptr());
    group.barrier(kTag);
    expect_error([&] { group.all_gather(flat, torch::zeros_like(shard), bounds, kTag); },
                 {"[all_gather]", "at its place"});
  });
}

}  // namespace tessera::testing::arena_test
