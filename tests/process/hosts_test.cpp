// Real processes on two hosts: network namespaces of this one, joined by a bridge.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "benchmarks/linked_hosts.h"
#include "launched.h"

namespace tessera::hosts_test {

using tools::LinkedHosts;

constexpr std::chrono::seconds kLimit{100};

// Starts rank `rank` of `size` on `host`.
std::unique_ptr<ProgramRun> start(const LinkedHosts& hosts, int host, int rank, int size,
                                  int local_rank, int local_size, const Command& program,
                                  const char* interface) {
  return std::make_unique<ProgramRun>(
      with(hosts.on_host(host), program),
      ProgramRun::Options{.environment = {{"RANK", std::to_string(rank)},
                                          {"WORLD_SIZE", std::to_string(size)},
                                          {"LOCAL_RANK", std::to_string(local_rank)},
                                          {"LOCAL_WORLD_SIZE", std::to_string(local_size)},
                                          {"MASTER_ADDR", hosts.address(0)},
                                          {"MASTER_PORT", "29533"},
                                          {"GLOO_SOCKET_IFNAME", interface},
                                          {"TESSERA_TIMEOUT", "40"},
                                          {"TESSERA_TRANSPORT", ""},
                                          {"TESSERA_RUN", ""},
                                          {"OMP_NUM_THREADS", "1"}},
                          .limit = kLimit});
}

std::vector<ProgramEnd> run_on_hosts(const LinkedHosts& hosts, const std::vector<int>& host_of_rank,
                                     const Command& program,
                                     const char* interface = LinkedHosts::kInterface) {
  std::vector<std::unique_ptr<ProgramRun>> runs;
  const int size = static_cast<int>(host_of_rank.size());
  std::vector<int> local(2, 0), local_size(2, 0);
  for (const int host : host_of_rank) ++local_size[host];
  for (int rank = 0; rank < size; ++rank) {
    const int host = host_of_rank[rank];
    runs.push_back(
        start(hosts, host, rank, size, local[host]++, local_size[host], program, interface));
  }
  std::vector<ProgramEnd> ends;
  for (const auto& run : runs) ends.push_back(run->wait());
  return ends;
}

TEST(ProcessesOnHostsSlow, ShareMemoryInsideAHost) {
  if (!LinkedHosts::can_be_made()) GTEST_SKIP() << "network namespaces can't be made here";
  const LinkedHosts hosts(2, /*mbit=*/0);
  struct Case {
    std::vector<int> host_of_rank;
    std::string transport;
  };
  for (const Case& c : {Case{{0, 0, 1, 1}, "arena+gloo"}, Case{{0, 1, 1, 0}, "arena+gloo"},
                        Case{{0, 0, 1}, "gloo"}, Case{{0, 1}, "gloo"}}) {
    const auto ends = run_on_hosts(hosts, c.host_of_rank, {WORLD_PROBE});
    const auto size = static_cast<int>(ends.size());
    for (const ProgramEnd& end : ends) {
      EXPECT_EQ(end.status, 0) << end.err;
      EXPECT_TRUE(contains(
          end.out, "sum " + std::to_string(size * (size + 1) / 2) + ", over " + c.transport + "\n"))
          << end.out << end.err;
    }
  }
}

TEST(ProcessesOnHostsSlow, ListenWhereTheOtherHostsReachThem) {
  if (!LinkedHosts::can_be_made()) GTEST_SKIP() << "network namespaces can't be made here";
  const LinkedHosts hosts(2, /*mbit=*/0);
  for (const ProgramEnd& end : run_on_hosts(hosts, {0, 1}, {WORLD_PROBE}, /*interface=*/""))
    EXPECT_TRUE(contains(end.out, "sum 3, over gloo\n")) << end.out << end.err;
}

TEST(ProcessesOnHostsSlow, AreStartedByMpirun) {
  if (std::string(TESSERA_MPIRUN).empty()) GTEST_SKIP() << "there is no mpirun";
  if (!LinkedHosts::can_be_made()) GTEST_SKIP() << "network namespaces can't be made here";
  const LinkedHosts hosts(2, /*mbit=*/0);
  const TemporaryDirectory directory;
  // In place of ssh: the last number of the address is that of the namespace, and one more.
  const std::string script = directory.path("connect"), space = hosts.on_host(0).back();
  std::ofstream(script) << "#!/bin/sh\nnumber=$((${1##*.} - 1)); shift\n"
                        << "TMPDIR=" << directory.path("$number")
                        << "; export TMPDIR; mkdir -p $TMPDIR\n"
                        << "exec ip netns exec " << space.substr(0, space.size() - 1)
                        << "$number sh -c \"$*\"\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  const std::string list = hosts.address(0) + ":2," + hosts.address(1) + ":1";
  const auto end =
      run_program(with(hosts.on_host(0), {TESSERA_CLI, "run", "--hosts", list, "--ssh", script,
                                          "--env", "GLOO_SOCKET_IFNAME", WORLD_PROBE}),
                  {.environment = {{"GLOO_SOCKET_IFNAME", LinkedHosts::kInterface},
                                   {"TESSERA_TIMEOUT", "40"},
                                   {"TMPDIR", directory.path()}},
                   .limit = kLimit});
  EXPECT_EQ(end.status, 0) << end.err;
  for (const char* rank : {"[0] rank 0 of 3", "[1] rank 1 of 3", "[2] rank 2 of 3, local rank 0"})
    EXPECT_TRUE(contains(end.out, rank)) << end.out;
  EXPECT_TRUE(contains(end.out, "sum 6, over")) << end.out;
}

}  // namespace tessera::hosts_test
