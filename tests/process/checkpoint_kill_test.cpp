// A save that is killed at any moment leaves a whole checkpoint: the one before it or its own.

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <random>
#include <thread>

#include "launched.h"
#include "launcher/reserved_port.h"

namespace tessera::checkpoint_kill_test {

using Seconds = std::chrono::duration<double>;

/// A time between 0 and `most`.
Seconds some_of(Seconds most, std::mt19937& random) {
  return std::uniform_real_distribution<double>(0, most.count())(random) * Seconds(1);
}

/// The number after the last "`key` " in the output of the probe; 0 if there is none.
int last_number(const std::string& text, const std::string& key) {
  const auto numbers = numbers_after(text, key);
  return numbers.empty() ? 0 : numbers.back();
}

using Probes = std::vector<std::unique_ptr<ProgramRun>>;

Probes start_probes(const std::string& directory, int ranks) {
  const tools::ReservedPort port(0);
  Probes probes;
  for (int rank = 0; rank < ranks; ++rank) {
    probes.push_back(std::make_unique<ProgramRun>(
        Command{CHECKPOINT_PROBE, directory},
        ProgramRun::Options{.environment = environment_of(rank, ranks, port.number())}));
  }
  for (const auto& probe : probes) {
    if (!probe->wait_for_output("ready\n")) ADD_FAILURE() << probe->wait().err;
  }
  return probes;
}

/// Lets `ranks` probes save, and kills them, one shortly after the other. Returns the number of the
/// checkpoint that they found, and sets `saved` to the last save that they finished.
int save_until_killed(const std::string& directory, int ranks, std::mt19937& random, int& saved) {
  Probes probes = start_probes(directory, ranks);
  const auto ready = std::chrono::steady_clock::now();
  EXPECT_TRUE(probes[0]->wait_for_output("saved "));
  const Seconds one_save = std::chrono::steady_clock::now() - ready;
  std::this_thread::sleep_for(some_of(3 * one_save, random));
  std::shuffle(probes.begin(), probes.end(), random);
  for (const auto& probe : probes) {
    probe->signal(SIGKILL);
    std::this_thread::sleep_for(some_of(one_save / 4, random));
  }
  int found = 0;
  for (const auto& probe : probes) {
    const ProgramEnd end = probe->wait();
    EXPECT_TRUE(end.status == 128 + SIGKILL || ranks > 1) << end.err;
    found = last_number(end.out, "found");
    saved = std::max(saved, last_number(end.out, "saved"));
  }
  return found;
}

void expect_whole_after_kills(int ranks, int kills) {
  SCOPED_TRACE(std::to_string(ranks) + " ranks");
  const TemporaryDirectory scratch;
  const std::string directory = scratch.path("checkpoint");
  std::mt19937 random(static_cast<unsigned>(ranks));
  int saved = 0;
  for (int kill = 0; kill < kills && !::testing::Test::HasFailure(); ++kill) {
    const int before = saved, found = save_until_killed(directory, ranks, random, saved);
    EXPECT_GE(found, before) << "a finished save is lost";
  }
  const ProgramEnd end = run_program({CHECKPOINT_PROBE, directory, "--look"});
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_GE(last_number(end.out, "found"), saved) << end.out;
  EXPECT_GE(saved, kills);
  int entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(scratch.path()))
    ++entries;
  EXPECT_LE(entries, 2) << "no more than a draft is left";
}

TEST(CheckpointKill, LeavesAWholeCheckpoint) { expect_whole_after_kills(1, 20); }

TEST(CheckpointKill, OfTwoRanksLeavesAWholeCheckpoint) { expect_whole_after_kills(2, 20); }

TEST(CheckpointKillNightly, LeavesAWholeCheckpointEachOf200Times) {
  expect_whole_after_kills(1, 200);
}

TEST(CheckpointKillNightly, OfTwoRanksLeavesAWholeCheckpointEachOf200Times) {
  expect_whole_after_kills(2, 200);
}

}  // namespace tessera::checkpoint_kill_test
