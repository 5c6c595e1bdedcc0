// Children that ranks fork: they have copies of the connections, and must leave them alone.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "support/contract.h"
#include "support/forked.h"

namespace tessera::testing::forked_child_test {

void expect_refused(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const c10::DistBackendError& error) {
    const std::string text = error.what_without_backtrace();
    TORCH_CHECK(text.find("this one was forked") != std::string::npos, text);
    return;
  }
  TORCH_CHECK(false, "a child may not communicate");
}

class ForkedChild : public ProcessGroupContract {};

TEST_P(ForkedChild, IsRefusedEachCollective) {
  run([](ProcessGroup& pg) {
    const int n = pg.size();
    std::vector<int64_t> bounds;
    for (int r = 0; r <= n; ++r) bounds.push_back(2 * r);
    auto flat = torch::zeros({2 * n}), shard = torch::ones({2});
    const std::vector<torch::Tensor> nothing(n);
    EXPECT_EQ(status_of_child([&] {
                expect_refused([&] { pg.all_gather(flat, shard, bounds, kTag)->wait(); });
                expect_refused([&] {
                  pg.reduce_scatter(shard, {{0, flat, 2 * n}}, bounds, {}, kTag)->wait();
                });
                expect_refused([&] { pg.all_reduce(flat, ReduceOp::kSum, kTag)->wait(); });
                expect_refused([&] { pg.broadcast(flat, 0, kTag)->wait(); });
                expect_refused([&] { pg.all_to_all(nothing, nothing, kTag)->wait(); });
                expect_refused([&] { pg.barrier(kTag); });
              }),
              0);
    pg.all_gather(flat, shard, bounds, kTag)->wait();
    EXPECT_TRUE(torch::equal(flat, torch::ones({2 * n})));
    pg.barrier(kTag);
  });
}

TEST_P(ForkedChild, NeitherWaitsForWhatIsUnderWayNorEndsIt) {
  run([](ProcessGroup& pg) {
    auto numbers = torch::ones({300'000}), others = torch::ones({10});
    std::vector<WorkPtr> works{pg.all_reduce(numbers, ReduceOp::kSum, kTag),
                               pg.all_reduce(others, ReduceOp::kSum, kTag)};
    EXPECT_EQ(status_of_child([&] {
                for (const WorkPtr& work : works)
                  if (!work->is_completed()) expect_refused([&] { work->wait(); });
                works.clear();
              }),
              0);
    for (const WorkPtr& work : works) work->wait();
    EXPECT_TRUE(torch::equal(numbers, torch::full({300'000}, static_cast<float>(pg.size()))));
    EXPECT_TRUE(torch::equal(others, torch::full({10}, static_cast<float>(pg.size()))));
    pg.barrier(kTag);
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, ForkedChild,
                         ::testing::Combine(::testing::Values(Kind::kGloo, Kind::kBackend,
                                                              Kind::kDecorated, Kind::kArena),
                                            ::testing::Values(2, 3)),
                         [](const auto& info) {
                           return kind_name(std::get<0>(info.param)) + "On" +
                                  std::to_string(std::get<1>(info.param));
                         });
INSTANTIATE_TEST_SUITE_P(Hosts, ForkedChild,
                         ::testing::Combine(::testing::Values(Kind::kHosts), ::testing::Values(4)));

class WorldOfAForkedChild : public ::testing::TestWithParam<Transport> {};

TEST_P(WorldOfAForkedChild, EndsThereAndNotInTheParent) {
  run_over(GetParam(), 3, [](World& world) {
    EXPECT_EQ(status_of_child([&] { const World gone = std::move(world); }), 0);
    auto number = torch::ones({1});
    world.process_group()->all_reduce(number, ReduceOp::kSum, kTag)->wait();
    EXPECT_EQ(number.item<float>(), 3);
  });
}

INSTANTIATE_TEST_SUITE_P(All, WorldOfAForkedChild,
                         ::testing::Values(Transport::kGloo, Transport::kArena));

// In a process that has another world, whose heap the child has inherited.
TEST(WorldOfAForkedChild, MayBeMadeAnew) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer ends a forked child that starts threads";
#endif
  run_arena(2, [](World& world) {
    world.process_group()->barrier(kTag);
    if (world.rank() != 0) return world.process_group()->barrier(kTag);
    const auto made = torch::arange(100'000);
    EXPECT_EQ(status_of_child([&] {
                // A child makes LibTorch's thread pool anew at its first use. Two threads must not
                // do that at the same time.
                at::init_num_threads();
                const auto store = c10::make_intrusive<c10d::HashStore>();
                std::vector<std::jthread> ranks;
                for (int rank = 0; rank < 2; ++rank) {
                  ranks.emplace_back([=] {
                    const World own = init(store, rank, 2, {.transport = Transport::kArena});
                    auto sum = made.clone();
                    own.process_group()->all_reduce(sum, ReduceOp::kSum, kTag)->wait();
                    TORCH_CHECK(torch::equal(sum, 2 * made));
                  });
                }
              }),
              0);
    world.process_group()->barrier(kTag);
  });
}

}  // namespace tessera::testing::forked_child_test
