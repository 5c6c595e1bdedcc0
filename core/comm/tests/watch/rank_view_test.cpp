// The texts and decisions that a rank makes of the other ranks' answers.
#include "comm/watch/rank_view.h"

#include <gtest/gtest.h>

#include "support/error_of.h"

namespace tessera::rank_view_test {

const CollectiveId kHead{"world", 1, 42};

RankView view_of(int rank, std::vector<int> lacking, CollectiveId id = kHead) {
  RankView view;
  view.rank = rank;
  view.silent_seconds = 0;
  view.phase = Phase::kForward;
  view.step = 5;
  view.phase_seconds = 10;
  view.last = "all_gather #41 of unit 'blocks.3'";
  view.is_blocked = true;
  view.wait = {id, "reduce_scatter #42 of unit 'head'", 10, std::move(lacking)};
  return view;
}

RankView busy(int rank) {
  RankView view = view_of(rank, {});
  view.is_blocked = false;
  view.wait.reset();
  return view;
}

TEST(WaitReport, SaysWhereTheLateRankIsAndWhoWaits) {
  const std::string line =
      wait_report(view_of(0, {1}), {busy(1), view_of(2, {1}), view_of(3, {1})});
  EXPECT_EQ(
      line,
      "[tessera] rank 1 is in forward of step 5 since 10 s, last collective all_gather #41 of unit "
      "'blocks.3'; ranks 0, 2, 3 wait for it in reduce_scatter #42 of unit 'head' (forward of "
      "step 5, since 10 s)");
}

TEST(WaitReport, SaysThatARankDoesNotAnswer) {
  RankView stopped = busy(1);
  stopped.silent_seconds = 9;
  const std::string line = wait_report(view_of(0, {}), {stopped, busy(2)});
  testing::expect_contains(line, {"rank 1 has not answered for 9 s"});
  EXPECT_EQ(line.find("rank 2"), std::string::npos) << line;
}

TEST(WaitReport, SaysThatARankHasNeverAnswered) {
  RankView unknown;
  unknown.rank = 1;
  const std::string line = wait_report(view_of(0, {}), {unknown});
  testing::expect_contains(line, {"rank 1 has not answered at all"});
}

TEST(WaitReport, SaysThatNobodyIsLate) {
  const std::string line = wait_report(view_of(0, {}), {view_of(1, {})});
  testing::expect_contains(line, {"all ranks have issued it", "ranks 0, 1 wait"});
}

TEST(WaitCycle, IsFoundOverThreeRanks) {
  const CollectiveId other{"world", 0, 7};
  EXPECT_EQ(wait_cycle(view_of(0, {1}), {view_of(1, {2}, other), view_of(2, {0}, other)}, 1),
            (std::vector{0, 1, 2}));
}

TEST(WaitCycle, NeedsRanksThatCanIssueNothing) {
  RankView writes_a_checkpoint = view_of(1, {0});
  writes_a_checkpoint.is_blocked = false;
  EXPECT_TRUE(wait_cycle(view_of(0, {1}), {writes_a_checkpoint}, 1).empty());
}

TEST(WaitCycle, NeedsWaitsThatHaveLasted) {
  RankView just_now = view_of(1, {0});
  just_now.wait->seconds = 0.5;
  EXPECT_TRUE(wait_cycle(view_of(0, {1}), {just_now}, 1).empty());
}

TEST(WaitCycle, IsNotAChainThatEndsAtABusyRank) {
  EXPECT_TRUE(wait_cycle(view_of(0, {1}), {view_of(1, {2}), busy(2)}, 1).empty());
}

}  // namespace tessera::rank_view_test
