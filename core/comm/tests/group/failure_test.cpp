// Errors on ranks when others fail, come late or do something else.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/run_world.h"

namespace tessera::failure_test {

using namespace std::chrono_literals;

std::string message_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("another type of exception: ") + error.what();
  }
  return "no exception";
}

class RankThatNeverComes : public ::testing::TestWithParam<std::string> {
 protected:
  static void run_collective(ProcessGroup& pg) {
    const std::string kind = GetParam();
    const CollectiveTag tag{.subject = "blocks.3", .channel = Channel::kParams};
    const std::vector<int64_t> bounds{0, 3, 6};
    auto flat = torch::zeros({6}), shard = torch::zeros({3});
    if (kind == "all_gather") {
      pg.all_gather(flat, shard, bounds, tag)->wait();
    } else if (kind == "reduce_scatter") {
      pg.reduce_scatter(shard, {{0, flat, 6}}, bounds, {}, tag)->wait();
    } else if (kind == "all_reduce") {
      pg.all_reduce(flat, ReduceOp::kSum, tag)->wait();
    } else if (kind == "broadcast") {
      pg.broadcast(flat, /*root=*/0, tag)->wait();
    } else if (kind == "all_to_all") {
      pg.all_to_all({shard, {}}, {torch::ones({3}), {}}, tag)->wait();
    } else {
      pg.barrier(tag);
    }
  }
};

TEST_P(RankThatNeverComes, IsNamedWithCollectiveUnitRankAndSeconds) {
  std::atomic<bool> waiting{true};
  run_world(
      2,
      [&](World& world) {
        if (world.rank() == 0) {
          while (waiting) {  // alive, but busy with something else
            std::this_thread::sleep_for(10ms);
          }
          return;
        }
        const auto start = std::chrono::steady_clock::now();
        const std::string message = message_of([&] { run_collective(*world.process_group()); });
        const auto waited = std::chrono::steady_clock::now() - start;
        waiting = false;
        testing::expect_contains(
            message, {"[" + std::string(GetParam()) + "]", "unit 'blocks.3'", "channel kParams, #0",
                      "rank 1 of 2", "waited 1.0 s for rank 0"});
        EXPECT_GT(waited, 900ms);
        EXPECT_LT(waited, 5s);
      },
      1s);
}

INSTANTIATE_TEST_SUITE_P(All, RankThatNeverComes,
                         ::testing::Values("all_gather", "reduce_scatter", "all_reduce",
                                           "broadcast", "all_to_all", "barrier"));

// Ranks that disagree time out; no rank gets another collective's data.
void expect_disagreement(const std::function<void(ProcessGroup&)>& collective) {
  std::atomic<int> done{0};
  run_world(
      2,
      [&](World& world) {
        const std::string message = message_of([&] { collective(*world.process_group()); });
        testing::expect_contains(
            message, {"[", "] unit '", "rank " + std::to_string(world.rank()) + " of 2"});
        ++done;
        while (done < 2) {
          std::this_thread::sleep_for(10ms);
        }
      },
      1s);
}

TEST(Disagreement, OnTheOrderOfUnitsTimesOut) {
  expect_disagreement([](ProcessGroup& pg) {
    auto first = torch::zeros({8}), second = torch::zeros({8});
    const std::vector<int64_t> bounds{0, 4, 8};
    const auto shard = torch::full({4}, 1.0f + pg.rank());
    const char* names[] = {"blocks.0", "blocks.1"};
    const auto a = pg.all_gather(first, shard, bounds, {.subject = names[pg.rank()]});
    const auto b = pg.all_gather(second, shard, bounds, {.subject = names[1 - pg.rank()]});
    a->wait();
  });
}

TEST(Disagreement, OnTheKindTimesOut) {
  expect_disagreement([](ProcessGroup& pg) {
    auto tensor = torch::zeros({8});
    if (pg.rank() == 0) {
      pg.all_reduce(tensor, ReduceOp::kSum, {.subject = "x"})->wait();
    } else {
      pg.broadcast(tensor, 0, {.subject = "x"})->wait();
    }
  });
}

TEST(Disagreement, OnTheSizeTimesOut) {
  expect_disagreement([](ProcessGroup& pg) {
    auto tensor = torch::zeros({100'000 + pg.rank()});
    pg.all_reduce(tensor, ReduceOp::kSum, {.subject = "x"})->wait();
  });
}

TEST(Disagreement, OnTheCutIntoPiecesTimesOut) {
  expect_disagreement([](ProcessGroup& pg) {
    auto out = torch::zeros({50});
    const auto data = torch::zeros({50});
    std::vector<Piece> pieces{{0, data, 50}, {50, data, 50}};
    if (pg.rank() == 1) {
      pieces = {{0, torch::zeros({100}), 100}};
    }
    pg.reduce_scatter(out, std::move(pieces), std::vector<int64_t>{0, 50, 100}, {},
                      {.subject = "x"})
        ->wait();
  });
}

TEST(Failure, IsThrownAgainByTheNextWait) {
  std::atomic<bool> waiting{true};
  run_world(
      2,
      [&](World& world) {
        if (world.rank() == 0) {
          while (waiting) {
            std::this_thread::sleep_for(10ms);
          }
          return;
        }
        auto tensor = torch::zeros({3});
        const auto work =
            world.process_group()->all_reduce(tensor, ReduceOp::kSum, {.subject = "x"});
        const std::string first = message_of([&] { work->wait(); });
        testing::expect_contains(first, {"waited 1.0 s"});
        EXPECT_EQ(message_of([&] { work->wait(); }), first);
        EXPECT_TRUE(work->is_completed());
        waiting = false;
      },
      1s);
}

TEST(Failure, OfOneRankReachesTheOthersBeforeTheTimeout) {
  EXPECT_THROW(run_world(
                   3,
                   [](World& world) {
                     TORCH_CHECK(world.rank() != 1, "rank 1 has a problem of its own");
                     auto tensor = torch::zeros({100'000});
                     const auto work = world.process_group()->all_reduce(tensor, ReduceOp::kSum,
                                                                         {.subject = "x"});
                     const std::string message = message_of([&] { work->wait(); });
                     // The rank that notices first leaves, too: any peer may be the one that a rank
                     // lost.
                     testing::expect_contains(
                         message, {"[all_reduce] unit 'x'", "failed before the timeout"});
                   },
                   1h),
               c10::Error);
}

TEST(Failure, LeavesNothingBehindThatHangs) {
  EXPECT_THROW(run_world(
                   2,
                   [](World& world) {
                     auto& pg = *world.process_group();
                     auto flat = torch::zeros({4'000'000}), out = torch::zeros({2'000'000});
                     const std::vector<int64_t> bounds{0, 2'000'000, 4'000'000};
                     std::vector<WorkPtr> works;
                     if (world.rank() == 0) {  // issued, never waited for, never joined
                       works.push_back(pg.all_gather(flat, out, bounds, {.subject = "a"}));
                       works.push_back(pg.reduce_scatter(out, {{0, flat, 4'000'000}}, bounds, {},
                                                         {.subject = "b"}));
                       works[0]->is_completed();
                     }
                     TORCH_CHECK_VALUE(false, "both ranks stop");
                   },
                   1h),
               c10::ValueError);
}

TEST(RunWorld, RethrowsTheFirstFailureWithItsRank) {
  try {
    run_world(3, [](World& world) {
      TORCH_CHECK_VALUE(world.rank() != 2, "no twos");
      world.process_group()->barrier({.subject = "x"});
    });
    FAIL() << "no exception";
  } catch (const c10::ValueError& error) {
    testing::expect_contains(error.what_without_backtrace(), {"no twos", "rank 2 of 3"});
  }
}

}  // namespace tessera::failure_test
