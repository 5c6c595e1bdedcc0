// Means of numbers over ranks.
#include <gtest/gtest.h>
#include <tessera/loop/metrics.h>

#include <cmath>
#include <limits>

#include "support/error_of.h"
#include "support/run_world.h"

namespace tessera::testing {
namespace metrics_test {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TEST(Metrics, MeanIsWeightedAndTheSameOnAllRanks) {
  run_world(3, [](World& world) {
    const int rank = world.rank();
    EXPECT_EQ(mean_over_ranks(rank), 1);
    EXPECT_EQ(sum_over_ranks(rank), 3);
    EXPECT_EQ(mean_over_ranks(10.0 * rank, rank), (10 + 40) / 3.0);
    // A rank without examples has no mean of its own.
    EXPECT_EQ(mean_over_ranks(rank == 1 ? kNaN : 4, rank == 1 ? 0 : 2), 4);
    EXPECT_TRUE(std::isnan(mean_over_ranks(1, 0)));
    const auto means = mean_over_ranks({{"loss", rank}, {"hits", 2.0 * rank}});
    EXPECT_EQ(means, (std::map<std::string, double>{{"loss", 1}, {"hits", 2}}));
  });
}

TEST(Metrics, OneProcessNeedsNoWorld) {
  EXPECT_EQ(mean_over_ranks(3), 3);
  EXPECT_EQ(sum_over_ranks(3), 3);
}

TEST(Metrics, WhatDiffersBetweenRanksIsRefusedOnAll) {
  run_world(2, [](World& world) {
    const int rank = world.rank();
    EXPECT_EQ(error_of([&] { mean_over_ranks(1, rank == 1 ? -1 : 1); }),
              "[mean_over_ranks] weights must be finite and not negative; rank " +
                  std::to_string(rank) + " has " + (rank == 1 ? "-1" : "1"));
    EXPECT_EQ(error_of([&] {
                mean_over_ranks({{rank == 1 ? "hits" : "loss", 1.0}});
              }),
              "[mean_over_ranks] all ranks must pass the same names; rank 0 has loss, rank 1 has "
              "hits");
  });
}

}  // namespace metrics_test
}  // namespace tessera::testing
