// A job of torchrun on two hosts, whose ranks are killed again and again, has the losses of one
// that nothing happens to. TESSERA_SOAK_SECONDS: for how long; 1800 by default.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/linked_hosts.h"
#include "process/launched.h"

namespace tessera::elastic_soak_test {

using Clock = std::chrono::steady_clock;
using tools::LinkedHosts;

// Two ranks on each of two hosts; torchrun starts them again after each failure.
class ElasticJob {
 public:
  ElasticJob(const LinkedHosts& hosts, int port, int64_t steps) {
    for (const int host : {0, 1}) {
      const Command torchrun = {"sh",
                                "-c",
                                "exec \"$@\" > " + path("log_" + std::to_string(host)) + " 2>&1",
                                "sh",
                                TESSERA_PYTHON,
                                "-m",
                                "torch.distributed.run",
                                "--nnodes",
                                "2",
                                "--nproc-per-node",
                                "2",
                                "--max-restarts",
                                "100000",
                                "--rdzv-backend",
                                "c10d",
                                "--rdzv-endpoint",
                                hosts.address(0) + ":" + std::to_string(port),
                                "--rdzv-conf",
                                "last_call_timeout=1,is_host=" + std::to_string(1 - host),
                                "--local-addr",
                                hosts.address(host),
                                "--no-python",
                                SOAK_WORKER,
                                "--elastic",
                                std::to_string(steps),
                                directory_.path()};
      runs_.push_back(std::make_unique<ProgramRun>(
          with(hosts.on_host(host), torchrun),
          ProgramRun::Options{.environment = {{"GLOO_SOCKET_IFNAME", LinkedHosts::kInterface},
                                              {"TESSERA_SECRET", "of this soak"},
                                              {"TESSERA_TIMEOUT", "20"},
                                              {"TESSERA_RUN", ""},
                                              {"OMP_NUM_THREADS", "1"}},
                              .limit = std::chrono::seconds(7200)}));
    }
  }

  bool is_running() const {
    return tessera::is_running(runs_[0]->pid()) && tessera::is_running(runs_[1]->pid());
  }

  // Ends one of the ranks; false if it has ended already.
  bool end_a_rank(std::mt19937& random) const {
    std::ifstream file(path("rank_" + std::to_string(random() % 4) + ".pid"));
    pid_t pid = 0;
    constexpr int kSignals[] = {SIGKILL, SIGSEGV, SIGABRT, SIGBUS};
    const int signal = kSignals[random() % std::size(kSignals)];
    return file >> pid && ::kill(pid, signal) == 0;
  }

  // Returns the losses of each step, in hexadecimal: more than one if a step had several.
  std::map<int64_t, std::set<std::string>> losses() {
    for (int host = 0; host < 2; ++host) {
      const int status = runs_[host]->wait().status;
      const std::string log = read_file(path("log_" + std::to_string(host)));
      EXPECT_EQ(status, 0) << log.substr(log.size() - std::min<size_t>(log.size(), 3000));
    }
    std::map<int64_t, std::set<std::string>> losses;
    std::ifstream file(path("losses"));
    int64_t step = 0;
    for (std::string loss; file >> step >> loss;) losses[step].insert(loss);
    return losses;
  }

 private:
  std::string path(const std::string& name) const { return directory_.path(name); }

  const TemporaryDirectory directory_;
  std::vector<std::unique_ptr<ProgramRun>> runs_;
};

TEST(ElasticSoakNightly, LossesAreThoseOfAnUndisturbedJob) {
  if (std::string(TESSERA_PYTHON).empty()) GTEST_SKIP() << "no Python with torch was found";
  if (!LinkedHosts::can_be_made()) GTEST_SKIP() << "network namespaces can't be made here";
  const char* const text = std::getenv("TESSERA_SOAK_SECONDS");
  const int seconds = text ? std::atoi(text) : 1800;
  const int64_t steps = seconds * int64_t{20};
  const LinkedHosts hosts(2, /*mbit=*/0);
  const auto expected = ElasticJob(hosts, 29518, steps).losses();
  ASSERT_EQ(std::ssize(expected), steps);

  ElasticJob job(hosts, 29519, steps);
  std::mt19937 random(1);
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  int faults = 0;
  while (Clock::now() < end && job.is_running()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(4000 + random() % 8000));
    faults += job.end_a_rank(random);
  }
  const auto losses = job.losses();
  EXPECT_EQ(losses, expected);
  std::cout << faults << " faults; " << losses.size() << " steps\n";
}

}  // namespace tessera::elastic_soak_test
