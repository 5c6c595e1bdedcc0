// Sharded training against one process that sees the whole batch: the main test of the library.
#include <gtest/gtest.h>

#include "support/models.h"

namespace tessera::testing::parity_test {

class Parity : public ::testing::TestWithParam<Transport> {};
INSTANTIATE_TEST_SUITE_P(Over, Parity, ::testing::ValuesIn(kTransports), transport_of_test);

TEST_P(Parity, EveryLevelPartitionAndUnitSizeGivesTheResultOfOneProcess) {
  TrainingRun run = sgd_run<Mlp>();
  run.steps = 3;  // the order of units is learned, used, and used after an update by it
  for (const int ranks : {1, 2, 3, 4}) {
    std::vector<ShardPlan> plans;
    for (const int64_t unit_bytes : {0, 6000, 1 << 24}) {
      for (const ShardPlan& plan : with_each_partition({.unit_bytes = unit_bytes}))
        plans.push_back(plan);
    }
    expect_parity_of_each(run, ranks, cases_of(plans), GetParam());
  }
}

}  // namespace tessera::testing::parity_test
