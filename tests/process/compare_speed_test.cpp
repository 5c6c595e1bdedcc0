// The sharded example and the same loop of plain LibTorch, which `./dev demo --compare` lets take
// turns.

#include <gtest/gtest.h>

#include <regex>

#include "example_files.h"
#include "launched.h"

namespace tessera::compare_speed_test {

const Command kTiny = {"--layers", "1",  "--width", "16", "--heads", "2",
                       "--seq",    "16", "--batch", "4",  "--lr",    "0.01"};

std::string joined(const Command& command) {
  std::string text;
  for (const auto& word : command) text += word + " ";
  return text;
}

std::vector<std::string> losses_of(const std::string& output) {
  const std::regex step("step ([0-9]+/30)  loss ([0-9.]+)");
  std::vector<std::string> losses;
  for (std::sregex_iterator it(output.begin(), output.end(), step), end; it != end; ++it)
    losses.push_back((*it)[1].str() + " " + (*it)[2].str());
  return losses;
}

struct CompareSpeed : ::testing::Test {
  CompareSpeed() { write_text(text); }

  const TemporaryDirectory directory;
  const std::string text = directory.path("text");
  const Command sharded =
      with({TESSERA_CLI, "run", "-n", "2", TRAIN_GPT, "--data", text, "--sample", "0"}, kTiny);
  const Command plain = with({PLAIN_GPT, "--data", text}, kTiny);
};

TEST_F(CompareSpeed, BothHaveTheSameLosses) {
  const auto sharded_end = run_program(with(sharded, {"--steps", "30"}));
  const auto plain_end = run_program(with(plain, {"--steps", "30"}));
  ASSERT_EQ(sharded_end.status, 0) << sharded_end.err;
  ASSERT_EQ(plain_end.status, 0) << plain_end.err;
  EXPECT_EQ(losses_of(plain_end.out).size(), 3) << plain_end.out;
  EXPECT_EQ(losses_of(plain_end.out), losses_of(sharded_end.out));
}

TEST_F(CompareSpeed, PrintsEachRoundAndTheMedianWithItsInterval) {
  const auto end = run_program({TESSERA_PYTHON, COMPARE_SPEED, "--rounds", "2", "--steps", "3",
                                "--sharded", joined(sharded), "--plain", joined(plain)});
  ASSERT_EQ(end.status, 0) << end.err;
  for (const char* part :
       {"round 1 of 2: sharded ", "round 2 of 2: ", "plain LibTorch with 2 threads"})
    EXPECT_TRUE(contains(end.out, part)) << end.out;
  EXPECT_TRUE(
      std::regex_search(end.out, std::regex("takes [0-9.]+ \\([0-9.]+ to [0-9.]+\\) of a step")))
      << end.out;
}

TEST_F(CompareSpeed, NamesTheProgramThatFails) {
  const auto end =
      run_program({TESSERA_PYTHON, COMPARE_SPEED, "--sharded", "false", "--plain", joined(plain)});
  EXPECT_NE(end.status, 0);
  EXPECT_TRUE(contains(end.err, "false --steps 25 ended with status 1")) << end.err;
}

}  // namespace tessera::compare_speed_test
