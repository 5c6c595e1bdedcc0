// A model that has no room on a rank starts sharded.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "started_ranks.h"

namespace tessera::start_test {

// With malloc alone: the limit is on addresses, and the page heap reserves many.
std::vector<ProgramEnd> start(int ranks, const std::string& mode, const std::string& mib) {
  return StartedRanks(ranks, {START_PROBE, mode, mib},
                      {{"TESSERA_PAGE_HEAP", "0"}, {"TESSERA_TRANSPORT", "gloo"}})
      .wait();
}

std::string sum_of(const std::string& out) {
  const std::string key = " sum ";
  const auto at = out.find(key);
  return at == std::string::npos ? "none" : out.substr(at, out.find('\n', at) - at);
}

// 1 GiB of parameters. 720 MiB have room for half of them, a unit, a tensor and the threads'
// stacks.
TEST(SlowStart, AModelThatDoesNotFitStartsSharded) {
  for (const ProgramEnd& failed : start(2, "eager", "720")) {
    EXPECT_EQ(failed.status, 1);
    EXPECT_TRUE(contains(failed.err, "can't allocate memory")) << failed.err;
  }
  const auto eager = start(1, "eager", "0"), deferred = start(2, "deferred", "720");
  ASSERT_EQ(eager[0].status, 0) << eager[0].err;
  EXPECT_NE(sum_of(eager[0].out), "none");
  for (const ProgramEnd& end : deferred) {
    EXPECT_EQ(end.status, 0) << end.err;
    EXPECT_EQ(sum_of(end.out), sum_of(eager[0].out));
  }
}

}  // namespace tessera::start_test
