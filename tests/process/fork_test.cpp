// Ranks that fork: over shared memory, a child may neither crash nor change the ranks' memory.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "started_ranks.h"

namespace tessera::fork_test {

class RanksThatFork : public ::testing::TestWithParam<std::string> {};

std::string sum_in(const ProgramEnd& end) {
  const size_t at = end.out.find(" sum ");
  return at == std::string::npos ? "" : end.out.substr(at);
}

TEST_P(RanksThatFork, TrainAsThoseThatDoNot) {
  std::set<std::string> sums;
  for (const char* transport : {"gloo", "arena"}) {
    for (const std::string& mode : {GetParam(), std::string("never")}) {
      const auto ends =
          StartedRanks(2, {FORK_PROBE, mode}, {{"TESSERA_TRANSPORT", transport}}).wait();
      for (const auto& end : ends) {
        EXPECT_EQ(end.status, 0) << transport << ": " << end.err;
        EXPECT_TRUE(contains(end.out, std::string(" over ") + transport)) << end.out;
        sums.insert(sum_in(end));
      }
    }
  }
  EXPECT_EQ(sums.size(), 1U);
  EXPECT_NE(*sums.begin(), "");
}

INSTANTIATE_TEST_SUITE_P(All, RanksThatFork,
                         ::testing::Values("read", "workers", "programs", "leave", "collective"));

}  // namespace tessera::fork_test
