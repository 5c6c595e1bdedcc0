// Ranks as threads give the results of ranks as processes.
#include <gtest/gtest.h>

#include <fstream>

#include "launched.h"

namespace tessera::spawn_test {

/// Loading LibTorch takes its time on a busy machine.
constexpr std::chrono::seconds kLimit{100};

struct Training {
  ProgramEnd end;
  std::string losses;
};

Training train(const TemporaryDirectory& directory, const Command& start, const Command& flags) {
  const std::string losses = directory.path("losses");
  Command command = start;
  const Command sizes = {"--data",   directory.path("text"),
                         "--losses", losses,
                         "--steps",  "6",
                         "--layers", "2",
                         "--width",  "32",
                         "--heads",  "2",
                         "--seq",    "16",
                         "--batch",  "4",
                         "--sample", "8"};
  command.insert(command.end(), sizes.begin(), sizes.end());
  command.insert(command.end(), flags.begin(), flags.end());
  Training training;
  training.end = run_program(
      command, {.environment = {{"OMP_NUM_THREADS", "1"}, {"TESSERA_RUN", ""}}, .limit = kLimit});
  training.losses = read_file(losses);
  return training;
}

TEST(SpawnedTraining, HasTheLossesOfProcesses) {
  const TemporaryDirectory directory;
  std::ofstream text(directory.path("text"));
  for (int i = 0; i < 400; ++i) text << "line " << i * i << " of a text\n";
  text.close();
  const auto processes =
      train(directory, {TESSERA_CLI, "run", "-n", "2", TRAIN_GPT}, {"--level", "p_g_os"});
  EXPECT_EQ(processes.end.status, 0) << processes.end.err;
  const auto threads = train(directory, {TRAIN_GPT}, {"--level", "p_g_os", "--threads", "2"});
  EXPECT_EQ(threads.end.status, 0) << threads.end.err;
  EXPECT_EQ(std::count(threads.losses.begin(), threads.losses.end(), '\n'), 6);
  EXPECT_EQ(threads.losses, processes.losses);
  EXPECT_NE(threads.end.out.find("2 ranks, p_g_os"), std::string::npos) << threads.end.out;
  EXPECT_EQ(threads.end.out.find("2 ranks, p_g_os"), threads.end.out.rfind("2 ranks, p_g_os"))
      << "one rank reports; got\n"
      << threads.end.out;
}

TEST(SpawnedTraining, SaysWhichRankFailed) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path("text")) << "too short";
  const auto threads = train(directory, {TRAIN_GPT}, {"--threads", "2"});
  EXPECT_EQ(threads.end.status, 1);
  EXPECT_NE(threads.end.err.find("must hold a batch"), std::string::npos) << threads.end.err;
  EXPECT_NE(threads.end.err.find("of 2"), std::string::npos) << threads.end.err;
}

}  // namespace tessera::spawn_test
