// The example trains the demo's model with ColossalAI's names as one process does.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <sstream>

#include "example_files.h"
#include "launched.h"

namespace tessera::sharded_model_test {

constexpr std::chrono::seconds kLimit{100};

struct Training {
  ProgramEnd end;
  std::vector<double> losses;
};

class ShardedModelExample : public ::testing::Test {
 protected:
  ShardedModelExample() { write_text(directory_.path("text")); }

  Training train(int ranks, const Command& flags) {
    const std::string losses = directory_.path("losses");
    std::istringstream words(
        "--steps 6 --layers 2 --width 32 --heads 4 --seq 16 --batch 6 --lr 0.01 --data " +
        directory_.path("text") + " --losses " + losses);
    Command command = {TESSERA_CLI, "run", "-n", std::to_string(ranks), SHARDED_MODEL};
    for (std::string word; words >> word;) command.push_back(word);
    command.insert(command.end(), flags.begin(), flags.end());
    Training training;
    training.end = run_program(
        command, {.environment = {{"OMP_NUM_THREADS", "1"}, {"TESSERA_RUN", ""}}, .limit = kLimit});
    training.losses = read_losses(losses);
    return training;
  }

  void expect_losses(const Training& training, const Training& expected, double tolerance) {
    ASSERT_EQ(training.end.status, 0) << training.end.err;
    ASSERT_EQ(training.losses.size(), 6u);
    for (size_t i = 0; i < 6; ++i)
      EXPECT_LE(std::abs(training.losses[i] / expected.losses[i] - 1), tolerance) << i;
  }

  TemporaryDirectory directory_;
};

TEST_F(ShardedModelExample, HasTheLossesOfOneProcess) {
  const Training alone = train(1, {"--dtype", "fp32"});
  ASSERT_EQ(alone.end.status, 0) << alone.end.err;
  ASSERT_EQ(alone.losses.size(), 6u);
  EXPECT_LT(alone.losses[5], alone.losses[0]);
  expect_losses(train(2, {"--dtype", "fp32"}), alone, 1e-5);
  expect_losses(train(2, {"--dtype", "fp32", "--cpu-offload"}), alone, 1e-5);
  expect_losses(train(2, {"--dtype", "bf16"}), alone, 0.02);
  expect_losses(train(2, {"--dtype", "fp16"}), alone, 0.02);
}

TEST_F(ShardedModelExample, SaysWhereMemoryGoes) {
  const std::string memory = directory_.path("memory");
  const Training training = train(2, {"--memory", memory});
  ASSERT_EQ(training.end.status, 0) << training.end.err;
  EXPECT_TRUE(contains(training.end.out, " parameters, sharded over 2 ranks")) << training.end.out;
  EXPECT_TRUE(contains(training.end.out, "rank 1 keeps ")) << training.end.out;
  for (const std::string& file : {memory, memory + ".svg", memory + ".json"})
    EXPECT_GT(std::filesystem::file_size(file), 1000u) << file;
}

TEST_F(ShardedModelExample, RefusesABatchThatTheRanksCanNotShare) {
  const Training training = train(4, {});
  EXPECT_NE(training.end.status, 0);
  EXPECT_TRUE(contains(training.end.err, "--batch is that of all ranks; expected a multiple of 4"))
      << training.end.err;
}

}  // namespace tessera::sharded_model_test
