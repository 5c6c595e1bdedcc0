#include "comm/start/deadline.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>
#include <stdexcept>
#include <string>

#include "comm/start/spawned_rank.h"
#include "support/run_world.h"

namespace tessera::deadline_test {

using namespace std::chrono_literals;

TEST(Deadline, TellsTheTimeThatIsLeft) {
  const Deadline deadline(100ms);
  EXPECT_FALSE(deadline.has_passed());
  EXPECT_LE(deadline.left(), 100ms);
  std::this_thread::sleep_for(120ms);
  EXPECT_TRUE(deadline.has_passed());
  EXPECT_EQ(deadline.left(), 1ms) << "c10d takes 0 for no limit";
  EXPECT_GE(deadline.waited(), 120ms);
}

TEST(Within, ReturnsTheResultOrRethrows) {
  const Deadline deadline(20s);
  EXPECT_EQ(within(
                deadline, [] { return std::string("done"); }, [] {}),
            "done");
  EXPECT_THROW(within(
                   deadline, []() -> int { throw std::out_of_range("far"); }, [] {}),
               std::out_of_range);
}

TEST(Within, LeavesACallThatTakesTooLong) {
  const auto go_on = std::make_shared<std::promise<void>>();
  const auto owned = std::make_shared<int>(7);
  int calls = 0;
  const Deadline deadline(300ms);
  const auto result = within(
      deadline,
      [owned, waits = go_on->get_future().share()] {
        waits.wait();
        return *owned;
      },
      [&] { ++calls; });
  EXPECT_FALSE(result);
  EXPECT_LT(deadline.waited(), 1300ms);
  EXPECT_GE(calls, 2);
  EXPECT_GT(owned.use_count(), 1) << "the call still owns it";
  go_on->set_value();
  for (int i = 0; i < 1000 && owned.use_count() > 1; ++i) std::this_thread::sleep_for(10ms);
  EXPECT_EQ(owned.use_count(), 1);
}

TEST(Within, EndsIfTheWaitingThreadThrows) {
  const Deadline deadline(20s);
  EXPECT_THROW(within(
                   deadline,
                   [] {
                     std::this_thread::sleep_for(1s);
                     return 1;
                   },
                   [] { throw std::out_of_range("enough"); }),
               std::out_of_range);
  EXPECT_LT(deadline.waited(), 1s);
}

TEST(Within, WorksForTheRankOfTheCallingThread) {
  run_world(2, [](World& world) {
    const auto rank = within(
        Deadline(20s), [] { return SpawnedRank::current()->info().rank; }, [] {});
    EXPECT_EQ(rank, world.rank());
  });
}

}  // namespace tessera::deadline_test
