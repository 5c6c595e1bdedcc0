#include "engine/access/use_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "support/models.h"

namespace tessera::use_order_test {

bool contains_in_order(const UseOrder& order, const UseOrder& part) {
  size_t next = 0;
  for (const int unit : order) {
    if (next < part.size() && unit == part[next]) ++next;
  }
  return next == part.size();
}

TEST(MergeOrders, ContainsEachOrderAndIsShortest) {
  EXPECT_EQ(merge_orders({{0, 1, 2}, {0, 1, 2}}), (UseOrder{0, 1, 2}));
  EXPECT_EQ(merge_orders({{0, 1, 3}, {0, 2, 3}}), (UseOrder{0, 1, 2, 3}));
  EXPECT_EQ(merge_orders({{}, {4, 5}}), (UseOrder{4, 5}));
  const std::vector<UseOrder> orders = {{0, 1, 2, 1, 0}, {0, 3, 2, 3}, {2, 0, 1}, {}};
  const auto merged = merge_orders(orders);
  for (const auto& order : orders) EXPECT_TRUE(contains_in_order(merged, order));
  EXPECT_EQ(merged, merge_orders(orders));
  for (size_t i = 1; i < merged.size(); ++i) EXPECT_NE(merged[i], merged[i - 1]);
}

TEST(InsertMissing, PutsAUnitBesideItsNeighbourInTheKnownOrder) {
  PassOrder pass{{0, 2}, {2, 0}};
  insert_missing(pass, {0, 1, 2, 3}, {0, 1, 2, 3});
  EXPECT_EQ(pass.forward, (UseOrder{0, 1, 2, 3}));
  EXPECT_EQ(pass.backward, (UseOrder{3, 2, 1, 0}));
  PassOrder first{{1}, {1}};
  insert_missing(first, {0, 1}, {0, 1});
  EXPECT_EQ(first.forward, (UseOrder{0, 1}));
  EXPECT_EQ(first.backward, (UseOrder{1, 0}));
  PassOrder forward_only{{0, 1, 2}, {2, 1}};  // backward needs no weights of the first layer
  insert_missing(forward_only, {0, 1, 2}, {0, 1, 2});
  EXPECT_EQ(forward_only.backward, (UseOrder{2, 1}));
  PassOrder learned{{3, 1}, {1, 3}};
  insert_missing(learned, {0, 1, 2, 3}, {3, 2, 0, 1});
  EXPECT_EQ(learned.forward, (UseOrder{3, 2, 0, 1}));
  EXPECT_EQ(learned.backward, (UseOrder{1, 0, 2, 3}));
}

TEST(SortUses, HasEachUseOnceAndFollowsTheKnownOrderElsewhere) {
  EXPECT_EQ(sort_uses({{2, 0}, {0, 1}}, {0, 1, 2}), (UseOrder{2, 0, 1}));
  EXPECT_EQ(sort_uses({{2, 0}, {1, 3}}, {0, 1, 2, 3}), (UseOrder{1, 2, 0, 3}));
  EXPECT_EQ(sort_uses({{2, 0}, {1, 3}}, {3, 2, 1, 0}), (UseOrder{2, 1, 3, 0}));
  EXPECT_EQ(sort_uses({{0, 1, 0}, {0, 2, 0}}, {}), (UseOrder{0, 1, 2, 0}));
  EXPECT_EQ(sort_uses({{}}, {0, 1}), UseOrder{});
  EXPECT_EQ(sort_uses({{0, 1}, {1, 0}}, {}), std::nullopt);
}

TEST(OrderHistory, RemembersWhatRanksUsedBefore) {
  const PassOrder known = registration_order(4);
  OrderHistory history;
  history.add({{{3, 1}, {1, 3}}, {{2, 1}, {1, 2}}});
  EXPECT_EQ(history.merged(known).forward, (UseOrder{2, 3, 1}));
  history.add({{{3, 2}, {2, 3}}, {{1, 0}, {0, 1}}});
  EXPECT_EQ(history.merged(known).forward, (UseOrder{3, 2, 1, 0}));
  EXPECT_EQ(history.merged(known).backward, (UseOrder{0, 1, 2, 3}));
}

TEST(OrderHistory, ForgetsPassesThatTheLatestContradicts) {
  OrderHistory history;
  history.add({{{0, 1}, {}}, {{2, 1}, {}}});
  history.add({{{1, 2}, {}}, {{0}, {}}});
  EXPECT_EQ(history.merged({}).forward, (UseOrder{0, 1, 2}));
}

TEST(OrderHistory, HoldsTheOrderOfEachRankThatContradictsAnother) {
  OrderHistory history;
  history.add({{{0, 1, 2}, {2, 1, 0}}, {{1, 0}, {0, 1}}});
  history.add({{{2, 3}, {3, 2}}, {{3, 1}, {1, 3}}});
  history.add({{{0, 3}, {3, 0}}, {{3, 0}, {0, 3}}});
  const PassOrder merged = history.merged(registration_order(4));
  EXPECT_TRUE(contains_in_order(merged.forward, {0, 1, 2, 3}));
  EXPECT_TRUE(contains_in_order(merged.forward, {3, 1, 0}));
  EXPECT_TRUE(contains_in_order(merged.backward, {3, 2, 1, 0}));
  EXPECT_TRUE(contains_in_order(merged.backward, {0, 1, 3}));
}

TEST(OrderHistory, BeginsAgainWhereRanksDoNotDiffer) {
  OrderHistory history;
  history.add({{{0, 1, 0, 1}, {}}, {{0, 1, 0}, {}}});
  history.add({{{0, 1}, {}}, {{0, 1}, {}}});
  EXPECT_EQ(history.merged({}).forward, (UseOrder{0, 1}));
}

TEST(PassOrder, JoinsForwardAndBackwardWithoutRepeatingTheTurn) {
  EXPECT_EQ(registration_order(3).joined(), (UseOrder{0, 1, 2, 1, 0}));
  EXPECT_EQ(PassOrder{}.joined(), UseOrder{});
}

// Follows a plan; checks it and returns how many gathers it does and the most bytes it holds.
struct Followed {
  size_t gathers = 0;
  int64_t peak = 0;
};
Followed follow(const UseOrder& order, const std::vector<int64_t>& nbytes, int64_t resident_bytes,
                int prefetch) {
  const auto steps = plan_residency(order, nbytes, resident_bytes, prefetch);
  EXPECT_EQ(steps.size(), order.size());
  Followed result;
  std::set<int> here;
  for (size_t p = 0; p < order.size(); ++p) {
    for (const int unit : steps[p].free)
      EXPECT_EQ(here.erase(unit), 1U) << "frees what is not here";
    for (const int unit : steps[p].gather)
      EXPECT_TRUE(here.insert(unit).second) << "gathers what is here";
    result.gathers += steps[p].gather.size();
    int64_t bytes = 0;
    for (const int unit : here) bytes += nbytes[unit];
    result.peak = std::max(result.peak, bytes);
    for (size_t ahead = p; ahead < order.size() && ahead <= p + static_cast<size_t>(prefetch);
         ++ahead) {
      if (nbytes[order[ahead]] > 0) {
        EXPECT_TRUE(here.contains(order[ahead])) << "position " << p;
      }
    }
  }
  return result;
}

TEST(PlanResidency, HoldsTheUnitInUseAndThoseAhead) {
  const UseOrder order = registration_order(6).joined();
  const std::vector<int64_t> nbytes(6, 10);
  for (const int prefetch : {0, 1, 2, 3}) {
    const auto followed = follow(order, nbytes, 0, prefetch);
    EXPECT_EQ(followed.peak, 10 * (1 + prefetch));
    EXPECT_LE(followed.gathers, 11U);
  }
  EXPECT_EQ(follow(order, nbytes, 0, 0).gathers, 11U);
  EXPECT_EQ(follow(order, nbytes, 0, 1).gathers, 10U);
}

TEST(PlanResidency, ABudgetSavesGathersAndIsKept) {
  const UseOrder order = registration_order(6).joined();
  const std::vector<int64_t> nbytes(6, 10);
  size_t last = 100;
  for (const int64_t budget : {0, 10, 20, 30, 40, 50}) {
    const auto followed = follow(order, nbytes, budget, 0);
    EXPECT_LE(followed.peak, 10 + budget);
    EXPECT_EQ(followed.gathers, 11U - budget / 10);
    EXPECT_LT(followed.gathers, last);
    last = followed.gathers;
    // With a byte less, one unit less stays.
    if (budget > 0) {
      EXPECT_EQ(follow(order, nbytes, budget - 1, 0).gathers, last + 1);
    }
  }
  const auto unlimited = follow(order, nbytes, -1, 1);
  EXPECT_EQ(unlimited.gathers, 6U);
  EXPECT_EQ(unlimited.peak, 60);
}

TEST(PlanResidency, TheFarthestNextUseGoesFirst) {
  // At the second use of 0, units 1 and 2 are idle: 2 is used sooner, and there is room for one.
  const UseOrder order = {1, 2, 0, 2, 1};
  const auto steps = plan_residency(order, {10, 10, 10}, 10, 0);
  EXPECT_EQ(steps[2].free, std::vector<int>{1});
  EXPECT_TRUE(steps[3].gather.empty());
  EXPECT_EQ(steps[4].gather, std::vector<int>{1});
}

TEST(PlanResidency, UnitsThatAreNeverFreedTakeNoPart) {
  const auto steps = plan_residency({0, 1, 2, 1, 0}, {10, 0, 10}, 0, 1);
  for (const auto& step : steps) {
    EXPECT_EQ(std::count(step.gather.begin(), step.gather.end(), 1), 0);
    EXPECT_EQ(std::count(step.free.begin(), step.free.end(), 1), 0);
  }
}

}  // namespace tessera::use_order_test
