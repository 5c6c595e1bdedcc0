// Real processes on two hosts: network namespaces of this one, joined by a cable.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "launched.h"

namespace tessera {
namespace hosts_test {

constexpr std::chrono::seconds kLimit{100};

// Two network namespaces; only root can make them.
class TwoHosts {
 public:
  TwoHosts() {
    for (int host = 0; host < 2; ++host) {
      EXPECT_TRUE(ip({"netns", "add", name(host)}));
    }
    EXPECT_TRUE(ip({"link", "add", "name", "cable", "netns", name(0), "type", "veth", "peer",
                    "name", "cable", "netns", name(1)}));
    for (int host = 0; host < 2; ++host) {
      EXPECT_TRUE(ip({"-n", name(host), "addr", "add", address(host) + "/24", "dev", "cable"}));
      EXPECT_TRUE(ip({"-n", name(host), "link", "set", "cable", "up"}));
      EXPECT_TRUE(ip({"-n", name(host), "link", "set", "lo", "up"}));
    }
  }
  ~TwoHosts() {
    for (int host = 0; host < 2; ++host) ip({"netns", "del", name(host)});
  }

  static bool can_be_made() {
    const std::string name = "tessera-probe-" + std::to_string(::getpid());
    return ::getuid() == 0 && ip({"netns", "add", name}) &&
           run_program({"ip", "netns", "exec", name, "true"}, {.limit = kLimit}).status == 0 &&
           ip({"netns", "del", name});
  }

  static std::string name(int host) {
    return "tessera-" + std::to_string(::getpid()) + "-" + std::to_string(host);
  }
  static std::string address(int host) { return "10.213.71." + std::to_string(1 + host); }

  // Starts rank `rank` of `size` on `host`.
  static std::unique_ptr<ProgramRun> start(int host, int rank, int size, int local_rank,
                                           int local_size, Command program) {
    Command command{"ip", "netns", "exec", name(host)};
    command.insert(command.end(), program.begin(), program.end());
    return std::make_unique<ProgramRun>(
        command,
        ProgramRun::Options{.environment = {{"RANK", std::to_string(rank)},
                                            {"WORLD_SIZE", std::to_string(size)},
                                            {"LOCAL_RANK", std::to_string(local_rank)},
                                            {"LOCAL_WORLD_SIZE", std::to_string(local_size)},
                                            {"MASTER_ADDR", address(0)},
                                            {"MASTER_PORT", "29533"},
                                            {"GLOO_SOCKET_IFNAME", "cable"},
                                            {"TESSERA_TIMEOUT", "40"},
                                            {"TESSERA_TRANSPORT", ""},
                                            {"TESSERA_RUN", ""},
                                            {"OMP_NUM_THREADS", "1"}},
                            .limit = kLimit});
  }

 private:
  static bool ip(Command arguments) {
    arguments.insert(arguments.begin(), "ip");
    try {
      return run_program(arguments, {.limit = kLimit}).status == 0;
    } catch (const std::exception&) {  // no such program
      return false;
    }
  }
};

std::vector<ProgramEnd> run_on_hosts(const std::vector<int>& host_of_rank, const Command& program) {
  std::vector<std::unique_ptr<ProgramRun>> runs;
  const int size = static_cast<int>(host_of_rank.size());
  std::vector<int> local(2, 0), local_size(2, 0);
  for (const int host : host_of_rank) ++local_size[host];
  for (int rank = 0; rank < size; ++rank) {
    const int host = host_of_rank[rank];
    runs.push_back(TwoHosts::start(host, rank, size, local[host]++, local_size[host], program));
  }
  std::vector<ProgramEnd> ends;
  for (const auto& run : runs) ends.push_back(run->wait());
  return ends;
}

TEST(ProcessesOnHostsSlow, ShareMemoryInsideAHost) {
  if (!TwoHosts::can_be_made()) GTEST_SKIP() << "network namespaces can't be made here";
  const TwoHosts hosts;
  struct Case {
    std::vector<int> host_of_rank;
    std::string transport;
  };
  for (const Case& c : {Case{{0, 0, 1, 1}, "arena+gloo"}, Case{{0, 1, 1, 0}, "arena+gloo"},
                        Case{{0, 0, 1}, "gloo"}, Case{{0, 1}, "gloo"}}) {
    const auto ends = run_on_hosts(c.host_of_rank, {WORLD_PROBE});
    const auto size = static_cast<int>(ends.size());
    for (const ProgramEnd& end : ends) {
      EXPECT_EQ(end.status, 0) << end.err;
      EXPECT_TRUE(contains(
          end.out, "sum " + std::to_string(size * (size + 1) / 2) + ", over " + c.transport + "\n"))
          << end.out << end.err;
    }
  }
}

TEST(ProcessesOnHostsSlow, AreStartedByOneLauncher) {
  if (!TwoHosts::can_be_made()) GTEST_SKIP() << "network namespaces can't be made here";
  const TwoHosts hosts;
  const TemporaryDirectory directory;
  // In place of ssh: the last number of the address is that of the namespace, and one more.
  const std::string script = directory.path("connect");
  std::ofstream(script) << "#!/bin/sh\nnumber=$((${1##*.} - 1)); shift\n"
                        << "exec ip netns exec tessera-" << ::getpid() << "-$number sh -c \"$*\"\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  const std::string list = TwoHosts::address(0) + ":2," + TwoHosts::address(1) + ":1";
  const auto end =
      run_program({TESSERA_CLI, "run", "--hosts", list, "--ssh", script, "--env",
                   "GLOO_SOCKET_IFNAME", WORLD_PROBE},
                  {.environment = {{"GLOO_SOCKET_IFNAME", "cable"}, {"TESSERA_TIMEOUT", "40"}},
                   .limit = kLimit});
  EXPECT_EQ(end.status, 0) << end.err;
  for (const char* rank : {"[0] rank 0 of 3", "[1] rank 1 of 3", "[2] rank 2 of 3, local rank 0"})
    EXPECT_TRUE(contains(end.out, rank)) << end.out;
  EXPECT_TRUE(contains(end.out, "sum 6, over")) << end.out;
}

}  // namespace hosts_test
}  // namespace tessera
