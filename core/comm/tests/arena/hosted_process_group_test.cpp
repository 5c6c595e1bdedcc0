// Ranks on several hosts that share memory with the others of their host.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <torch/torch.h>

#include <vector>

#include "comm/arena/host_table.h"
#include "support/contract.h"
#include "support/error_of.h"
#include "support/resident_pages.h"
#include "support/run_world.h"
#include "support/shared_memory_of.h"

namespace tessera::testing::hosted_process_group_test {

// Bounds of `ranks` parts of `pages` pages of floats each.
std::vector<int64_t> even_pages(int ranks, int64_t pages) {
  std::vector<int64_t> bounds{0};
  for (int r = 0; r < ranks; ++r) bounds.push_back(bounds.back() + pages * 1024);
  return bounds;
}

TEST(HostTable, NumbersHostsByTheirFirstRank) {
  const HostTable table({"b", "a", "b", "a"});
  EXPECT_EQ(table.hosts(), 2);
  EXPECT_EQ(table.ranks_per_host(), 2);
  EXPECT_EQ(table.host_of(1), 1);
  EXPECT_EQ(table.index_of(3), 1);
  EXPECT_EQ(table.rail(0), (std::vector<int>{0, 1}));
  EXPECT_EQ(table.rail(1), (std::vector<int>{2, 3}));
}

TEST(HostTable, TellsUnequalHosts) {
  EXPECT_EQ(HostTable({"a", "b", "b"}).ranks_per_host(), 0);
  EXPECT_EQ(HostTable({"a", "b"}).ranks_per_host(), 1);
}

TEST(Hosts, WorldTakesTheArenaInsideAHost) {
  run_hosts(
      4, by_halves,
      [](World& world) {
        EXPECT_EQ(world.process_group()->backend_name(), "arena+gloo");
        EXPECT_EQ(world.process_group()->sends_to(), std::vector<int>{(world.rank() + 2) % 4});
      },
      std::chrono::seconds(30), Transport::kAuto);
}

TEST(Hosts, PartsOfAWorldShareWhatTheyCan) {
  run_hosts(
      4, by_halves,
      [](World& world) {
        const int rank = world.rank();
        std::vector<std::string> backends;
        for (const auto& ranks :
             std::vector<std::vector<int>>{{0, 1}, {2, 3}, {0, 2}, {1, 3}, {0, 1, 2}}) {
          if (const auto made = world.new_process_group(ranks))
            backends.push_back(made->backend_name());
        }
        std::vector<std::string> expected{"arena", "gloo"};
        if (rank < 3) expected.push_back("gloo");
        EXPECT_EQ(backends, expected) << rank;
      },
      std::chrono::seconds(30), Transport::kAuto);
}

TEST(Hosts, ArenaIsRefusedOnAllRanksWhereHostsDiffer) {
  for (const int size : {2, 3}) {
    std::atomic<int> refused{0};
    EXPECT_THROW(run_hosts(size, by_turns, [&](World&) { ++refused; }), c10::NotImplementedError);
    EXPECT_EQ(refused, 0);
  }
}

class SharedGather : public ::testing::TestWithParam<int (*)(int)> {};

// Gathers into the same buffer repeatedly, with new values each time.
TEST_P(SharedGather, FetchesWhatOtherHostsOwnAndGivesItBack) {
  run_hosts(4, GetParam(), [](World& world) {
    const auto counter = counting_process_group(world.process_group());
    const int64_t numel = 100'003;  // a part has many pages, and ends within one
    const std::vector<int64_t> bounds{0, 25'001, 25'001, 70'000, numel};
    const auto buffer = shared_memory_of(*counter).share(numel * 4, kTag);
    ASSERT_TRUE(buffer);
    EXPECT_FALSE(buffer->stays_whole);
    const auto flat = buffer->bytes.view(torch::kFloat);
    const auto seen = buffer->read_only.view(torch::kFloat);
    const auto own = part(flat, bounds, world.rank());
    const int64_t all_pages = (numel * 4 + 4095) / 4096;
    // The pages in which ranks of this host own elements.
    int64_t own_pages = 0;
    for (int r = 0; r < 4; ++r) {
      if (GetParam()(r) == GetParam()(world.rank()))
        own_pages += (bounds[r + 1] - bounds[r]) * 4 / 4096 + 2;
    }
    for (int round = 0; round < 20; ++round) {
      const auto expected = values(numel, torch::kFloat, round);
      own.copy_(part(expected, bounds, world.rank()));
      counter->reset_counts();
      counter->all_gather(flat, own, bounds, kTag)->wait();
      EXPECT_EQ(counter->counts().all_gather.bytes_sent, own.numel() * 4);
      EXPECT_TRUE(torch::equal(seen, expected)) << "rank " << world.rank() << " round " << round;
      EXPECT_EQ(resident_pages(buffer->bytes), all_pages);
      counter->barrier(kTag);
      if (round % 3 == 2) continue;  // gathers again without a release
      shared_memory_of(*counter).release(*buffer);
      shared_memory_of(*counter).release(*buffer);
      counter->barrier(kTag);
      EXPECT_LE(resident_pages(buffer->bytes), own_pages) << "of " << all_pages;
      EXPECT_TRUE(torch::equal(own, part(expected, bounds, world.rank())));
      counter->barrier(kTag);
    }
  });
}

// Ranks release late, and gather before others have released: no rank may lose a page it reads.
TEST_P(SharedGather, WaitsForTheReadersOfTheHost) {
  run_hosts(4, GetParam(), [](World& world) {
    auto& pg = *world.process_group();
    const std::vector<int64_t> bounds = even_pages(4, 8);
    std::vector<SharedBuffer> buffers;
    for (int i = 0; i < 3; ++i)
      buffers.push_back(*shared_memory_of(pg).share(bounds.back() * 4, kTag));
    std::vector<WorkPtr> works(3);
    const auto own = [&](int i) {
      return part(buffers[i].bytes.view(torch::kFloat), bounds, world.rank());
    };
    for (int i = 0; i < 3; ++i) own(i).fill_(i + 1);
    const auto gather = [&](int i) {
      works[i] = pg.all_gather(buffers[i].bytes.view(torch::kFloat), own(i), bounds, kTag);
    };
    gather(0);
    for (int step = 0; step < 300; ++step) {
      const int i = step % 3;
      gather((i + 1) % 3);
      works[i]->wait();
      if ((step * 7 + world.rank() * 3) % 11 == 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const auto sum = buffers[i].read_only.view(torch::kFloat).sum().item<double>();
      ASSERT_EQ(sum, static_cast<double>((i + 1) * bounds.back())) << step;
      shared_memory_of(pg).release(buffers[i]);
    }
    pg.barrier(kTag);
  });
}

INSTANTIATE_TEST_SUITE_P(Hosts, SharedGather, ::testing::Values(by_halves, by_turns),
                         [](const auto& info) {
                           return info.param == by_halves ? "ByHalves" : "ByTurns";
                         });

TEST(Hosts, SumsAreTheSameInEveryRunAndOnAllRanks) {
  std::vector<torch::Tensor> first(4);
  for (int run = 0; run < 2; ++run) {
    run_hosts(4, by_turns, [&](World& world) {
      auto& pg = *world.process_group();
      torch::Tensor sum = torch::sin(torch::arange(50'000, torch::kFloat) * (world.rank() + 1));
      pg.all_reduce(sum, ReduceOp::kSum, kTag)->wait();
      if (run == 0) first[world.rank()] = sum;
      EXPECT_TRUE(torch::equal(sum, first[world.rank()]));
      auto of_rank_0 = sum.clone();
      pg.broadcast(of_rank_0, 0, kTag)->wait();
      EXPECT_TRUE(torch::equal(sum, of_rank_0));
    });
  }
}

TEST(Hosts, ReduceScatterSendsTheSumsOfAHost) {
  run_hosts(4, by_halves, [](World& world) {
    const auto counter = counting_process_group(world.process_group());
    const auto bounds = even_pages(4, 1);
    const auto flat = values(bounds.back(), torch::kBFloat16, world.rank());
    auto out = torch::zeros({bounds[1]});
    counter
        ->reduce_scatter(out, {{0, flat, flat.numel()}}, bounds, {.dtype = torch::kBFloat16}, kTag)
        ->wait();
    EXPECT_EQ(counter->counts().reduce_scatter.bytes_sent, bounds[1] * 2);
    auto sum = torch::zeros({bounds.back()});
    for (int r = 0; r < 4; ++r) sum += values(bounds.back(), torch::kFloat, r);
    EXPECT_TRUE(torch::equal(out, part(sum, bounds, world.rank())));
  });
}

// Among all ranks of all hosts, while gathers into shared memory are under way.
TEST(Hosts, MessagesGoBetweenAllRanks) {
  run_hosts(4, by_turns, [](World& world) {
    auto& pg = *world.process_group();
    const int rank = world.rank();
    const auto bounds = even_pages(4, 8);
    const auto buffer = *shared_memory_of(pg).share(bounds.back() * 4, kTag);
    const auto flat = buffer.bytes.view(torch::kFloat);
    const auto numel = [](int sender, int receiver) { return 30'000 * sender + 10 * receiver; };
    for (int round = 0; round < 10; ++round) {
      part(flat, bounds, rank).fill_(round);
      std::vector<torch::Tensor> to, from;
      for (int r = 0; r < 4; ++r) {
        to.push_back(torch::full({numel(rank, r)}, 100 * round + 10 * rank + r));
        from.push_back(torch::zeros({numel(r, rank)}, torch::kInt64));
      }
      const auto gathered = pg.all_gather(flat, part(flat, bounds, rank), bounds, kTag);
      const auto exchanged = pg.all_to_all(from, std::move(to), kTag);
      exchanged->wait();
      gathered->wait();
      for (int r = 0; r < 4; ++r)
        EXPECT_TRUE((from[r] == 100 * round + 10 * r + rank).all().item<bool>()) << round;
      EXPECT_TRUE((buffer.read_only.view(torch::kFloat) == round).all().item<bool>()) << round;
      shared_memory_of(pg).release(buffer);
      pg.barrier(kTag);  // before others write their parts again
    }
  });
}

// A rank that left or never comes must not block others for ever, at any step of a collective.
TEST(Hosts, ARankThatNeverComesIsToldOf) {
  for (const int late : {0, 1, 3}) {
    std::atomic<int> failed{0};
    run_hosts(
        4, by_halves,
        [&](World& world) {
          auto& pg = *world.process_group();
          const auto bounds = even_pages(4, 1);
          const auto buffer = *shared_memory_of(pg).share(bounds.back() * 4, kTag);
          const auto flat = buffer.bytes.view(torch::kFloat);
          const auto start = std::chrono::steady_clock::now();
          const auto is_late = [&] {
            return std::chrono::steady_clock::now() - start > std::chrono::seconds(20);
          };
          if (world.rank() == late) {
            while (failed < 3 && !is_late())
              std::this_thread::sleep_for(std::chrono::milliseconds(5));
            return;
          }
          try {
            pg.all_gather(flat, part(flat, bounds, world.rank()), bounds, kTag)->wait();
            // The gather may succeed where the host lacks nothing of the late rank's rail.
            pg.barrier(kTag);
            ADD_FAILURE() << "rank " << world.rank();
          } catch (const c10::DistBackendError& error) {
            expect_contains(error.what(), {"unit 'contract'"});
          }
          ++failed;
          while (failed < 3 && !is_late())
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        },
        std::chrono::seconds(1));
    EXPECT_EQ(failed, 3);
  }
}

TEST(Hosts, AWorldCanBeLeftWithCollectivesUnderWay) {
  run_hosts(4, by_halves, [](World& world) {
    auto& pg = *world.process_group();
    const auto bounds = even_pages(4, 1);
    const auto buffer = *shared_memory_of(pg).share(bounds.back() * 4, kTag);
    const auto flat = buffer.bytes.view(torch::kFloat);
    if (world.rank() == 2) return;
    const auto work = pg.all_gather(flat, part(flat, bounds, world.rank()), bounds, kTag);
  });
}

}  // namespace tessera::testing::hosted_process_group_test
