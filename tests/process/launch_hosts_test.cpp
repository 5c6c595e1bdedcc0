// `tessera run --hosts`, with a script in place of ssh that runs each host's launcher here.

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "launched.h"

namespace tessera {
namespace launch_hosts_test {

namespace fs = std::filesystem;

/// Hosts of this machine; the connection to each is a process whose id is in a file.
class FakeHosts {
 public:
  FakeHosts() {
    std::ofstream(script()) << "#!/bin/sh\n"
                               "echo $$ > "
                            << directory_.path()
                            << "/$1.pid\n"
                               "[ -e "
                            << directory_.path()
                            << "/$1.down ] && exit 255\n"
                               "HOST_NAME=$1; export HOST_NAME; shift\n"
                               "exec sh -c \"$*\"\n";
    fs::permissions(script(), fs::perms::owner_all);
  }

  Command run(const Command& options, const Command& flags) const {
    return launched(with({"--ssh", script(), "--master", "127.0.0.1"}, options), flags);
  }
  pid_t connection(const std::string& host) const {
    return std::atoi(read_file(directory_.path(host + ".pid")).c_str());
  }
  /// From now on the host can't be connected.
  void take_down(const std::string& host) const { std::ofstream(directory_.path(host + ".down")); }
  std::string path(const std::string& name) const { return directory_.path(name); }

 private:
  std::string script() const { return directory_.path("connect"); }
  TemporaryDirectory directory_;
};

TEST(LaunchHosts, StartTheRanksOfAllHostsAsOneJob) {
  const FakeHosts hosts;
  const auto end =
      run_program(hosts.run({"--hosts", "a:2,user@b:1", "--env", "SEASON"},
                            {"--env", "WORLD_SIZE", "--env", "LOCAL_RANK", "--env", "HOST_NAME",
                             "--env", "SEASON", "--env", "TESSERA_COLOUR", "--env", "TESSERA_JOB"}),
                  {.environment = {{"SEASON", "it's spring"}, {"TESSERA_COLOUR", "blue"}}});
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_EQ(end.err, "");
  for (const char* line : {"[0] WORLD_SIZE=3\n", "[2] WORLD_SIZE=3\n", "[1] LOCAL_RANK=1\n",
                           "[2] LOCAL_RANK=0\n", "[1] HOST_NAME=a\n", "[2] HOST_NAME=user@b\n",
                           "[2] SEASON=it's spring\n", "[2] TESSERA_COLOUR=blue\n"}) {
    EXPECT_TRUE(contains(end.out, line)) << line << end.out;
  }
  std::vector<std::string> jobs;
  for (size_t at = 0; (at = end.out.find("TESSERA_JOB=", at)) != std::string::npos; ++at)
    jobs.push_back(end.out.substr(at, end.out.find('\n', at) - at));
  ASSERT_EQ(jobs.size(), 3U);
  EXPECT_EQ(jobs[0], jobs[1]);
  EXPECT_EQ(jobs[0], jobs[2]);
}

TEST(LaunchHosts, RunInTheSameDirectoryAndPassArgumentsUnchanged) {
  const FakeHosts hosts;
  Command command = hosts.run({"--hosts", "a:1"}, {});
  command.pop_back();
  const auto end = run_program(with(
      command, {"sh", "-c", "pwd; printf '<%s>' \"$@\"", "sh", "a b", "it's", "$HOME", "", "--"}));
  EXPECT_EQ(end.out, "[0] " + fs::current_path().string() + "\n[0] <a b><it's><$HOME><><-->\n")
      << end.err;
}

TEST(LaunchHosts, TheFirstFailureEndsAllHostsAndTheCauseComesFirst) {
  const FakeHosts hosts;
  const auto end = run_program(
      hosts.run({"--hosts", "a:2,b:2", "--grace", "1"},
                {"--pid",       "--on-rank", "3",         "--sleep",     "0.3",
                 "--print-err", "the cause", "--exit",    "7",           "--on-rank",
                 "0",           "--sleep",   "0.6",       "--print-err", "rank 3 is gone",
                 "--exit",      "1",         "--on-rank", "1",           "--sleep",
                 "60",          "--on-rank", "2",         "--sleep",     "60"}));
  EXPECT_EQ(end.status, 7);
  EXPECT_TRUE(contains(end.err,
                       "tessera run: the last lines that rank 3 wrote to stderr:\n"
                       "    the cause\n"
                       "tessera run: rank 3 failed first: exit status 7\n"
                       "tessera run: rank 0 failed, too: exit status 1:\n"
                       "    rank 3 is gone\n"))
      << end.err;
  const auto pids = numbers_after(end.out, "pid");
  EXPECT_EQ(pids.size(), 4U);
  EXPECT_TRUE(all_end(pids));
}

TEST(LaunchHosts, AreAllRestarted) {
  const FakeHosts hosts;
  const auto end = run_program(hosts.run(
      {"--hosts", "a:1,b:1", "--max-restarts", "2"},
      {"--env", "TESSERA_RESTART", "--on-restart", "0", "--on-rank", "1", "--exit", "3"}));
  // --on-rank replaces --on-restart: rank 1 fails at each start.
  EXPECT_EQ(end.status, 3) << end.err;
  for (const char* line : {"[0] TESSERA_RESTART=2\n", "[1] TESSERA_RESTART=2\n"})
    EXPECT_TRUE(contains(end.out, line)) << end.out;
  EXPECT_TRUE(contains(end.err, "restart 2 of 2: starting 2 ranks again on a, b, port "))
      << end.err;
}

TEST(LaunchHosts, GoOnWithoutALostHost) {
  const FakeHosts hosts;
  ProgramRun run(hosts.run({"--hosts", "a:2,b:1,c:1", "--max-restarts", "2", "--min-hosts", "2"},
                           {"--pid", "--env", "WORLD_SIZE", "--env", "HOST_NAME", "--on-restart",
                            "0", "--sleep", "60"}));
  ASSERT_TRUE(run.wait_for_output("HOST_NAME", 4));
  const auto pids = numbers_after(run.output(), "pid");
  ::kill(hosts.connection("b"), SIGKILL);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_TRUE(contains(end.err, "host b with rank 2 was lost")) << end.err;
  EXPECT_TRUE(contains(end.err, "restart 1 of 2: starting 3 ranks again on a, c")) << end.err;
  EXPECT_TRUE(contains(end.out, "[2] WORLD_SIZE=3\n[2] HOST_NAME=c\n")) << end.out;
  EXPECT_TRUE(all_end(pids));
}

TEST(LaunchHosts, GiveUpWhenTooFewAreLeft) {
  const FakeHosts hosts;
  hosts.take_down("b");
  const auto end = run_program(hosts.run(
      {"--hosts", "a:1,b:1", "--max-restarts", "2", "--min-hosts", "2"}, {"--sleep", "60"}));
  EXPECT_EQ(end.status, 255);
  EXPECT_TRUE(contains(end.err, "host b with rank 1 did not start its ranks")) << end.err;
  EXPECT_TRUE(contains(end.err, "1 hosts are left; --min-hosts is 2")) << end.err;
}

TEST(LaunchHosts, LeaveNoRankWhenTheLauncherIsKilled) {
  const FakeHosts hosts;
  ProgramRun run(hosts.run({"--hosts", "a:2,b:1"}, {"--pid", "--child", "--sleep", "60"}));
  ASSERT_TRUE(run.wait_for_output("pid ", 6));
  run.signal(SIGKILL);
  const auto pids = numbers_after(run.wait().out, "pid");
  EXPECT_EQ(pids.size(), 6U);
  EXPECT_TRUE(all_end(pids));
}

TEST(LaunchHosts, PassSignalsOnToTheRanks) {
  const FakeHosts hosts;
  ProgramRun run(hosts.run({"--hosts", "a:1,b:1"},
                           {"--tell", "15", "--tell", "12", "--print", "ready", "--wait-signal",
                            "60", "--sleep", "0.3", "--print", "saved"}));
  ASSERT_TRUE(run.wait_for_output("ready", 2));
  run.signal(SIGUSR2);
  ASSERT_TRUE(run.wait_for_output("got 12", 2));
  run.signal(SIGTERM);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 0);
  for (const char* line : {"[0] got 15\n", "[1] got 15\n", "[1] saved\n"})
    EXPECT_TRUE(contains(end.out, line)) << end.out;
  EXPECT_TRUE(contains(end.err, "interrupted by signal 15")) << end.err;
}

TEST(LaunchHosts, NameAProgramThatIsNotThere) {
  const FakeHosts hosts;
  Command command = hosts.run({"--hosts", "a:1,b:1", "--max-restarts", "3"}, {});
  command.back() = "./no_such_program";
  const auto end = run_program(command);
  EXPECT_EQ(end.status, 127);
  EXPECT_TRUE(contains(end.err, ": cannot execute './no_such_program'")) << end.err;
  EXPECT_FALSE(contains(end.err, "restart")) << end.err;
}

TEST(LaunchHosts, MergeTheFlightRecordsOfAllHosts) {
  const FakeHosts hosts;
  const std::string script =
      "printf '{\"rank\":%s,\"size\":3,\"culprit\":%s,\"reason\":\"lost\",\"records\":[]}' $RANK "
      "$([ $RANK = 2 ] && echo -1 || echo 2) > $TESSERA_FLIGHT_DIR/rank_$RANK.json; "
      "[ $RANK = 2 ] && exec sleep 60; sleep 0.$RANK; exit 4";
  Command command = hosts.run({"--hosts", "a:1,b:2", "--log-dir", hosts.path("logs")}, {});
  command.pop_back();
  const auto end = run_program(with(command, {"sh", "-c", script}));
  EXPECT_EQ(end.status, 4);
  EXPECT_TRUE(contains(end.err, "rank 2 is the cause, by the flight records of the others"))
      << end.err;
  EXPECT_TRUE(fs::exists(hosts.path("logs/flight/flight.json")));
}

TEST(LaunchHosts, ShowTheFlightRecordsThatAUserSignalAsksFor) {
  const FakeHosts hosts;
  const std::string script =
      "trap 'printf "
      "\"{\\\"rank\\\":%s,\\\"size\\\":2,\\\"reason\\\":\\\"SIGUSR1\\\",\\\"records\\\":[]}\" "
      "$RANK "
      "> $TESSERA_FLIGHT_DIR/new_$RANK; mv $TESSERA_FLIGHT_DIR/new_$RANK "
      "$TESSERA_FLIGHT_DIR/rank_$RANK.json' "
      "USR1; "
      "echo ready; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 0.1; done; echo done";
  Command command = hosts.run({"--hosts", "a:1,b:1", "--log-dir", hosts.path("logs")}, {});
  command.pop_back();
  ProgramRun run(with(command, {"sh", "-c", script}));
  ASSERT_TRUE(run.wait_for_output("ready", 2));
  run.signal(SIGUSR1);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 0);
  for (const char* line : {"rank 0: step 0: SIGUSR1\n", "rank 1: step 0: SIGUSR1\n"})
    EXPECT_TRUE(contains(end.err, line)) << end.err;
  EXPECT_TRUE(fs::exists(hosts.path("logs/flight/flight.json")));
}

}  // namespace launch_hosts_test
}  // namespace tessera
