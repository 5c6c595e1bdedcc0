// The example that trains a model which needs more memory than its processes may use.
#include <gtest/gtest.h>

#include <regex>

#include "example_files.h"
#include "launched.h"

namespace tessera::bigger_than_memory_test {

std::vector<double> losses_in(const std::string& output) {
  const std::regex step("step [0-9]+/[0-9]+  loss ([0-9.]+)");
  std::vector<double> losses;
  for (std::sregex_iterator it(output.begin(), output.end(), step), end; it != end; ++it)
    losses.push_back(std::stod((*it)[1].str()));
  return losses;
}

struct BiggerThanMemory : ::testing::Test {
  BiggerThanMemory() { write_text(directory.path("text")); }

  Command with_sizes(Command command, int width, int layers, int seq) const {
    return with(std::move(command),
                {"--data", directory.path("text"), "--offload", directory.path("files"), "--width",
                 std::to_string(width), "--layers", std::to_string(layers), "--heads", "4", "--seq",
                 std::to_string(seq), "--batch", "6", "--lr", "0.01"});
  }

  const TemporaryDirectory directory;
};

TEST_F(BiggerThanMemory, HasTheLossesOfOneProcess) {
  const ProgramEnd plain = run_program(with_sizes({BIGGER_THAN_MEMORY, "--plain"}, 32, 2, 16));
  ASSERT_EQ(plain.status, 0) << plain.err;
  const auto expected = losses_in(plain.out);
  ASSERT_EQ(expected.size(), 4u) << plain.out;
  EXPECT_LT(expected[3], expected[0]);
  for (const std::string ranks : {"1", "3"}) {
    const ProgramEnd end = run_program(with_sizes(
        {TESSERA_CLI, "run", "-n", ranks, "--no-prefix", BIGGER_THAN_MEMORY}, 32, 2, 16));
    ASSERT_EQ(end.status, 0) << end.err;
    const auto losses = losses_in(end.out);
    ASSERT_EQ(losses.size(), expected.size()) << end.out;
    // As printed, to six digits, and a few roundings of sums in another order.
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-5);
  }
}

// 57 M parameters: 0.9 GB with gradients and AdamW's state.
TEST_F(BiggerThanMemory, TrainsWhereTheKernelKillsOneProcess) {
  const ProgramEnd end =
      run_program(with_sizes({TESSERA_PYTHON, "-B", BIGGER_THAN_MEMORY_SCRIPT, TESSERA_BUILD,
                              "--limit", "500", "--no-unlimited", "--steps", "2"},
                             768, 8, 32));
  if (contains(end.err, "cgroup")) GTEST_SKIP() << end.err;
  EXPECT_EQ(end.status, 0) << end.out << end.err;
  EXPECT_TRUE(contains(end.out, "LibTorch alone: killed after 0 steps")) << end.out;
  EXPECT_TRUE(contains(end.out, "sharded: 2 steps")) << end.out;
}

}  // namespace tessera::bigger_than_memory_test
