// The reading of reports, on which the table of faults rests.
#include "blame.h"

#include <gtest/gtest.h>

namespace tessera::blame_test {

Blame read(const std::string& text, int self = 0, Culprit culprit = {.ranks = {1}}) {
  return find_blame({{5.0, "rank " + std::to_string(self) + ": [barrier] failed"}, {7.0, text}},
                    self, culprit);
}

TEST(Blame, FindsTheCulpritAndTheTimeOfItsName) {
  const auto blame = read("rank 0 of 4 waited for rank 1; likely causes: rank 1 failed or ended");
  EXPECT_TRUE(blame.names_culprit);
  EXPECT_FALSE(blame.blames_another);
  EXPECT_EQ(blame.at, 7.0);
}

TEST(Blame, DoesNotTakeOneNumberForAnother) {
  EXPECT_FALSE(read("rank 12 has left").names_culprit);
  EXPECT_FALSE(read("rank 0 of 1").names_culprit);
}

TEST(Blame, ReadsListsOfRanks) {
  EXPECT_TRUE(read("ranks 0, 1 and 3 have not come").names_culprit);
  EXPECT_TRUE(read("ranks 0-2 have not come").names_culprit);
  EXPECT_FALSE(read("ranks 2, 3 have not come").names_culprit);
}

TEST(Blame, SeesThatAnotherIsBlamed) {
  EXPECT_TRUE(read("waited for rank 2").blames_another) << "the culprit is not named at all";
  EXPECT_TRUE(read("rank 2 failed or ended, and so did rank 1").blames_another);
  EXPECT_FALSE(read("waited for rank 2: rank 1 was killed by signal 9").blames_another);
  EXPECT_FALSE(read("rank 1 has left; rank 2 ended after it").blames_another);
  EXPECT_FALSE(read("the timeout passed").blames_another) << "itself is not another";
}

TEST(Blame, WantsBothStepAndCollective) {
  EXPECT_TRUE(read("rank 1 is in forward of step 5, last all_gather of 'head'").places);
  EXPECT_TRUE(read("rank 1 is in step 5").places) << "the line before names a barrier";
  EXPECT_FALSE(read("rank 1 is in the next step").places);
}

TEST(Blame, FindsACulpritThatIsNoRank) {
  const Culprit port{.other = R"(\b29500\b)"};
  EXPECT_TRUE(read("127.0.0.1:29500 belongs to another service", 0, port).names_culprit);
  EXPECT_TRUE(read("rank 1 has not come", 0, port).blames_another);
}

}  // namespace tessera::blame_test
