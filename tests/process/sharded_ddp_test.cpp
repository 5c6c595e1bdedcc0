// The example learns scikit-learn's digits on two ranks as in one process.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "example_files.h"
#include "launched.h"

namespace tessera::sharded_ddp_test {

constexpr std::chrono::seconds kLimit{50};
constexpr size_t kEpochs = 16, kStepsPerEpoch = 22;
constexpr int kScikitLearnIsMissing = 3;  // the exit status of the script

const std::map<std::string, std::string> kEnvironment = {
    {"OMP_NUM_THREADS", "1"}, {"TESSERA_RUN", ""},          {"RANK", ""},
    {"WORLD_SIZE", ""},       {"OMPI_COMM_WORLD_RANK", ""}, {"SLURM_PROCID", ""}};

struct Learning {
  ProgramEnd end;
  std::vector<double> losses;  ///< of each step
  double accuracy = 0;         ///< at the end, in per cent of the held-out images
};

Learning learn(const TemporaryDirectory& directory, const Command& launcher) {
  Command command = launcher;
  for (const std::string& word :
       {std::string(SHARDED_DDP), std::string("--data"), directory.path("digits"),
        std::string("--losses"), directory.path("losses")})
    command.push_back(word);
  Learning learning;
  learning.end = run_program(command, {.environment = kEnvironment, .limit = kLimit});
  learning.losses = read_losses(directory.path("losses"));
  const std::string key = "held-out accuracy ";
  const auto at = learning.end.out.rfind(key);
  if (at != std::string::npos)
    learning.accuracy = std::stod(learning.end.out.substr(at + key.size()));
  return learning;
}

std::string error_of(const TemporaryDirectory& directory, const std::string& contents) {
  std::ofstream(directory.path("digits"), std::ios::binary) << contents;
  const Learning learning = learn(directory, {});
  EXPECT_EQ(learning.end.status, 1);
  EXPECT_TRUE(contains(learning.end.err, "scripts/export_digits.py " + directory.path("digits")))
      << learning.end.err;
  return learning.end.err;
}

TEST(ShardedDdpExample, LearnsDigitsAsOneProcessDoes) {
  const TemporaryDirectory directory;
  const ProgramEnd written =
      run_program({TESSERA_PYTHON, "-B", EXPORT_DIGITS, directory.path("digits")});
  if (written.status == kScikitLearnIsMissing) GTEST_SKIP() << written.err;
  ASSERT_EQ(written.status, 0) << written.err;
  const Learning alone = learn(directory, {});
  ASSERT_EQ(alone.end.status, 0) << alone.end.err;
  const Learning shared = learn(directory, {TESSERA_CLI, "run", "-n", "2"});
  ASSERT_EQ(shared.end.status, 0) << shared.end.err;

  EXPECT_GE(alone.accuracy, 97);
  EXPECT_GE(shared.accuracy, 97);
  ASSERT_EQ(alone.losses.size(), kEpochs * kStepsPerEpoch);
  ASSERT_EQ(shared.losses.size(), alone.losses.size());
  // Sums over half a batch round otherwise. Sooner or later, depending on the machine, that decides
  // which of two pixels a max-pool takes or on which side of 0 a ReLU's input lies; from that step
  // on the losses diverge. Even so, the first steps can't be far apart.
  for (size_t i = 0; i < kStepsPerEpoch; ++i)
    EXPECT_LE(std::abs(shared.losses[i] / alone.losses[i] - 1), 1e-3) << i;
}

TEST(ShardedDdpExample, RanksShareTheMomentum) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path("digits"), std::ios::binary)
      << "digits 100\n"
      << std::string(6400, '\5') << std::string(100, '\3');
  const auto bytes_in = [&](const Command& launcher) {
    const Learning learning = learn(directory, launcher);
    EXPECT_EQ(learning.end.status, 0) << learning.end.err;
    return numbers_after(learning.end.out, "keeps");
  };
  const auto alone = bytes_in({}), shared = bytes_in({TESSERA_CLI, "run", "-n", "2"});
  ASSERT_EQ(alone.size(), 1u);
  ASSERT_EQ(shared.size(), 2u);
  EXPECT_GT(std::min(shared[0], shared[1]), 0);
  EXPECT_EQ(shared[0] + shared[1], alone[0]);
}

TEST(ShardedDdpExample, SaysHowToMakeAFileThatIsMissingOrWrong) {
  const TemporaryDirectory directory;
  const Learning learning = learn(directory, {});
  EXPECT_EQ(learning.end.status, 1);
  EXPECT_TRUE(contains(learning.end.err, "--data must be a file that can be read; got '" +
                                             directory.path("digits") + "'"))
      << learning.end.err;
  EXPECT_TRUE(contains(learning.end.err, "./dev example sharded_ddp")) << learning.end.err;

  const std::string image(64, '\1');
  for (const char* start : {"", "digits", "digits 0\n", "digits 1", "letters 1\n"})
    EXPECT_TRUE(contains(error_of(directory, start), "must begin with a line \"digits N\""));
  EXPECT_TRUE(contains(error_of(directory, "digits 2\n" + image + "\1"),
                       "must hold 2 images; expected 130 bytes after its first line, got 65"));
  EXPECT_TRUE(contains(error_of(directory, "digits 1\n" + image + "\n"),
                       "must have pixels up to 16 and labels up to 9; got 1 and 10"));
}

}  // namespace tessera::sharded_ddp_test
