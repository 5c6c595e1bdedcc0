// The example trains the demo's model, cut over ranks, as one process does.
#include <gtest/gtest.h>

#include <cmath>

#include "example_files.h"
#include "launched.h"

namespace tessera::tensor_parallel_test {

constexpr std::chrono::seconds kLimit{100};

struct Training {
  ProgramEnd end;
  std::vector<double> losses;
};

Training train(const TemporaryDirectory& directory, int ranks, const Command& flags = {}) {
  const std::string losses = directory.path("losses");
  Command command = {TESSERA_CLI,
                     "run",
                     "-n",
                     std::to_string(ranks),
                     TENSOR_PARALLEL,
                     "--data",
                     directory.path("text"),
                     "--losses",
                     losses,
                     "--steps",
                     "6",
                     "--layers",
                     "2",
                     "--width",
                     "32",
                     "--heads",
                     "4",
                     "--seq",
                     "16",
                     "--batch",
                     "4"};
  command.insert(command.end(), flags.begin(), flags.end());
  Training training;
  // Strict: an operator without a rule is an error, so none is computed on whole tensors for lack
  // of one.
  training.end = run_program(
      command,
      {.environment = {{"OMP_NUM_THREADS", "1"}, {"TESSERA_RUN", ""}, {"TESSERA_STRICT", "1"}},
       .limit = kLimit});
  training.losses = read_losses(losses);
  return training;
}

TEST(TensorParallelExample, HasTheLossesOfOneProcess) {
  const TemporaryDirectory directory;
  write_text(directory.path("text"));
  const Training alone = train(directory, 1);
  ASSERT_EQ(alone.end.status, 0) << alone.end.err;
  ASSERT_EQ(alone.losses.size(), 6u);
  EXPECT_LT(alone.losses[5], alone.losses[0]);
  for (const Command& flags : {Command{"--show"}, Command{"--sequence", "--show"}}) {
    const Training cut = train(directory, 2, flags);
    ASSERT_EQ(cut.end.status, 0) << cut.end.err;
    ASSERT_EQ(cut.losses.size(), 6u);
    for (size_t i = 0; i < 6; ++i)
      EXPECT_LT(std::abs(cut.losses[i] / alone.losses[i] - 1), 1e-5) << i;
    EXPECT_NE(cut.end.out.find("reduce_scatter"), std::string::npos) << cut.end.out;
  }
}

TEST(TensorParallelExample, RefusesHeadsThatTheRanksCanNotShare) {
  const TemporaryDirectory directory;
  write_text(directory.path("text"));
  const Training training = train(directory, 3);
  EXPECT_NE(training.end.status, 0);
  EXPECT_NE(training.end.err.find("--heads must be a multiple of the 3 ranks; got 4"),
            std::string::npos)
      << training.end.err;
}

}  // namespace tessera::tensor_parallel_test
