// A job whose rank is killed starts again from its last checkpoint, and ends as if nothing had
// happened.

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <thread>

#include "benchmarks/linked_hosts.h"
#include "example_files.h"
#include "launched.h"

namespace tessera::restart_test {

namespace fs = std::filesystem;

// The program of a rank, which goes on from the last checkpoint of `name`.
Command train_gpt(const TemporaryDirectory& directory, const std::string& name, int steps,
                  int save_every) {
  const std::string flags =
      " --level p_g_os --layers 1 --width 32 --heads 2 --seq 32 --batch 4 --eval-every 4000 "
      "--sample 0 --resume --steps " +
      std::to_string(steps) + " --save-every " + std::to_string(save_every);
  std::istringstream words(flags);
  return with({TRAIN_GPT, "--data", directory.path("text"), "--losses",
               directory.path(name + ".losses"), "--save", directory.path(name)},
              {std::istream_iterator<std::string>(words), std::istream_iterator<std::string>()});
}

Command train(const TemporaryDirectory& directory, const std::string& name, int restarts) {
  return with(
      {TESSERA_CLI, "run", "-n", "2", "--grace", "0.3", "--max-restarts", std::to_string(restarts)},
      train_gpt(directory, name, 120, 10));
}

std::vector<pid_t> pids_in(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<pid_t>(stream), std::istream_iterator<pid_t>()};
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
  for (const auto& entry : fs::directory_iterator(directory.path("killed")))
    kept += entry.is_directory();  // the others are metrics
  EXPECT_EQ(kept, 2);
}

// Two hosts are network namespaces of this one. torchrun starts the ranks of both; the first host
// goes on alone from the last checkpoint.
TEST(RestartSlow, TorchrunGoesOnWithoutALostHost) {
  using tools::LinkedHosts;
  if (!LinkedHosts::can_be_made()) GTEST_SKIP() << "network namespaces can't be made here";
  const LinkedHosts hosts(2, /*mbit=*/0);
  const TemporaryDirectory directory;
  write_text(directory.path("text"));
  std::vector<std::unique_ptr<ProgramRun>> runs;
  for (const int host : {0, 1}) {
    // In a namespace, torchrun can't tell by the machine's name which host has the rendezvous.
    const Command torchrun = {TESSERA_PYTHON,
                              "-m",
                              "torch.distributed.run",
                              "--nnodes",
                              "1:2",
                              "--nproc-per-node",
                              "2",
                              "--max-restarts",
                              "3",
                              "--rdzv-backend",
                              "c10d",
                              "--rdzv-endpoint",
                              hosts.address(0) + ":29517",
                              "--rdzv-conf",
                              "last_call_timeout=3,is_host=" + std::to_string(1 - host),
                              "--local-addr",
                              hosts.address(host),
                              "--no-python"};
    runs.push_back(std::make_unique<ProgramRun>(
        with(hosts.on_host(host), with(torchrun, train_gpt(directory, "job", 2000, 100))),
        ProgramRun::Options{.environment = {{"GLOO_SOCKET_IFNAME", LinkedHosts::kInterface},
                                            {"TESSERA_TIMEOUT", "30"},
                                            {"TESSERA_RUN", ""},
                                            {"OMP_NUM_THREADS", "1"}},
                            .limit = std::chrono::seconds(200)}));
  }
  if (!runs[0]->wait_for_output("step 200/2000")) {
    const std::string err = runs[0]->wait().err;
    if (contains(err, "No module named 'torch'")) GTEST_SKIP() << TESSERA_PYTHON << " has no torch";
    FAIL() << err;
  }
  // All at once, as a host that loses its power.
  Command list = hosts.on_host(1);  // "ip netns exec NAME"
  list[2] = "pids";
  for (const pid_t pid : pids_in(run_program(list).out)) ::kill(pid, SIGKILL);
  const auto end = runs[0]->wait();
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_TRUE(contains(end.out, "4 ranks, p_g_os, after step 0")) << end.out;
  EXPECT_TRUE(contains(end.out, "2 ranks, p_g_os, after step ")) << end.out << end.err;
  EXPECT_FALSE(contains(end.out, "2 ranks, p_g_os, after step 0:")) << end.out;
}

}  // namespace tessera::restart_test
