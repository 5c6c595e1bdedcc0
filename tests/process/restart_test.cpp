// A job whose rank is killed starts again from its last checkpoint, and ends as if nothing had
// happened.

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "example_files.h"
#include "launched.h"

namespace tessera {
namespace restart_test {

namespace fs = std::filesystem;

Command train(const TemporaryDirectory& directory, const std::string& name, int restarts) {
  return {TESSERA_CLI,
          "run",
          "-n",
          "2",
          "--grace",
          "0.3",
          "--max-restarts",
          std::to_string(restarts),
          TRAIN_GPT,
          "--data",
          directory.path("text"),
          "--level",
          "p_g_os",
          "--layers",
          "1",
          "--width",
          "32",
          "--heads",
          "2",
          "--seq",
          "32",
          "--batch",
          "4",
          "--steps",
          "120",
          "--save-every",
          "10",
          "--eval-every",
          "1000",
          "--sample",
          "0",
          "--losses",
          directory.path(name + ".losses"),
          "--save",
          directory.path(name),
          "--resume"};
}

// The processes that a process has started.
std::vector<pid_t> children_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) + "/children");
  std::vector<pid_t> children;
  for (pid_t child = 0; file >> child;) children.push_back(child);
  return children;
}

// The ranks: those of its descendants that run the example.
std::vector<pid_t> ranks_of(pid_t launcher) {
  std::vector<pid_t> ranks;
  for (const pid_t child : children_of(launcher)) {
    std::error_code error;
    const fs::path program = fs::read_symlink("/proc/" + std::to_string(child) + "/exe", error);
    if (!error && program.filename() == "train_gpt") ranks.push_back(child);
    for (const pid_t rank : ranks_of(child)) ranks.push_back(rank);
  }
  return ranks;
}

bool wait_for(const std::string& path) {
  for (int tries = 0; tries < 3000; ++tries) {
    if (fs::exists(path)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

TEST(Restart, AKilledRankIsMadeUpForFromTheLastCheckpoint) {
  const TemporaryDirectory directory;
  write_text(directory.path("text"));
  const ProgramEnd whole = run_program(train(directory, "whole", 0));
  ASSERT_EQ(whole.status, 0) << whole.err;
  const auto expected = read_losses(directory.path("whole.losses"));
  ASSERT_EQ(expected.size(), 120U);

  ProgramRun run(train(directory, "killed", 2));
  ASSERT_TRUE(wait_for(directory.path("killed/step-20/index.json")));
  const auto ranks = ranks_of(run.pid());
  ASSERT_EQ(ranks.size(), 2U);
  ::kill(ranks[1], SIGKILL);
  const ProgramEnd end = run.wait();
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_TRUE(contains(end.err, "SIGKILL") || contains(end.err, "signal 9")) << end.err;
  // The file holds the losses since the last start.
  const auto losses = read_losses(directory.path("killed.losses"));
  ASSERT_LT(losses.size(), expected.size());
  ASSERT_FALSE(losses.empty());
  for (size_t i = 1; i <= losses.size(); ++i)
    EXPECT_EQ(losses[losses.size() - i], expected[expected.size() - i]) << i << " from the end";
  // Both checkpoints hold the same; the two newest are left.
  const ProgramEnd diff =
      run_program({TESSERA_CLI, "ckpt", "diff", "--quiet", directory.path("whole/step-120"),
                   directory.path("killed/step-120")});
  EXPECT_EQ(diff.status, 0) << diff.out << diff.err;
  int kept = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator(directory.path("killed")))
    ++kept;
  EXPECT_EQ(kept, 2);
}

}  // namespace restart_test
}  // namespace tessera
