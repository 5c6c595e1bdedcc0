// `tessera run --hosts`: mpirun starts each host's launcher, with a script in place of ssh that
// runs it here.

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "launched.h"

namespace tessera {
namespace launch_hosts_test {

namespace fs = std::filesystem;

class LaunchHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::string(TESSERA_MPIRUN).empty()) GTEST_SKIP() << "there is no mpirun";
    // Each host has its own files.
    std::ofstream(script()) << "#!/bin/sh\nHOST_NAME=$1; TMPDIR=" << path("") << "$1; shift\n"
                            << "export HOST_NAME TMPDIR; mkdir -p $TMPDIR; exec sh -c \"$*\"\n";
    fs::permissions(script(), fs::perms::owner_all);
  }
  Command run(const Command& options, const Command& flags) const {
    return launched(with({"--ssh", script(), "--master", "127.0.0.1"}, options), flags);
  }
  Command run_shell(const Command& options, const std::string& text) const {
    Command command = run(options, {});
    command.pop_back();
    return with(command, {"sh", "-c", text});
  }
  // Jobs of Open MPI that begin and end at once may fail on their common folder in TMPDIR.
  ProgramRun::Options options(std::map<std::string, std::string> environment = {}) const {
    environment["TMPDIR"] = directory_.path();
    return {.environment = environment};
  }
  std::string path(const std::string& name) const { return directory_.path(name); }

 private:
  std::string script() const { return path("connect"); }
  TemporaryDirectory directory_;
};

TEST_F(LaunchHosts, StartTheRanksOfAllHostsAsOneJob) {
  const auto end =
      run_program(run({"--hosts", "node-a:2,node-b:1", "--env", "SEASON"},
                      {"--env", "WORLD_SIZE", "--env", "LOCAL_RANK", "--env", "HOST_NAME", "--env",
                       "SEASON", "--env", "TESSERA_COLOUR", "--env", "TESSERA_JOB"}),
                  options({{"SEASON", "it's spring"}, {"TESSERA_COLOUR", "blue"}}));
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_EQ(end.err, "");
  for (const char* line : {"[0] WORLD_SIZE=3\n", "[2] WORLD_SIZE=3\n", "[1] LOCAL_RANK=1\n",
                           "[2] LOCAL_RANK=0\n", "[1] HOST_NAME=node-a\n", "[2] HOST_NAME=node-b\n",
                           "[2] SEASON=it's spring\n", "[2] TESSERA_COLOUR=blue\n"}) {
    EXPECT_TRUE(contains(end.out, line)) << line << end.out;
  }
  std::set<std::string> jobs;
  for (size_t at = 0; (at = end.out.find("TESSERA_JOB=", at)) != std::string::npos; ++at)
    jobs.insert(end.out.substr(at, end.out.find('\n', at) - at));
  EXPECT_EQ(jobs.size(), 1U);
}

TEST_F(LaunchHosts, PassSecretsAndValuesOnBesideTheCommandLines) {
  const std::string script =
      "[ -n \"$TESSERA_SECRET\" ] || exit 3; printenv TESSERA_SECRET SEASON > $LIST.$RANK; "
      "cat /proc/[0-9]*/cmdline 2> /dev/null | tr '\\0' '\\n' | grep -cFf $LIST.$RANK; "
      "cat $LIST.$RANK";
  const auto end = run_program(
      run_shell({"--hosts", "node-a:1,node-b:1", "--env", "LIST", "--env", "SEASON=warm and windy"},
                script),
      options({{"LIST", path("secrets")}}));
  EXPECT_EQ(end.status, 0) << end.err;
  for (const char* line : {"[0] 0\n", "[1] 0\n", "[1] warm and windy\n"})
    EXPECT_TRUE(contains(end.out, line)) << line << end.out;
  EXPECT_EQ(read_file(path("secrets.0")), read_file(path("secrets.1")));
}

TEST_F(LaunchHosts, RunInTheSameDirectoryAndPassArgumentsUnchanged) {
  Command command = run_shell({"--hosts", "node-a:1"}, "pwd; printf '<%s>' \"$@\"");
  const auto end = run_program(with(command, {"sh", "a b", "it's", "$HOME", "", "--"}), options());
  EXPECT_EQ(end.out, "[0] " + fs::current_path().string() + "\n[0] <a b><it's><$HOME><><-->\n")
      << end.err;
}

TEST_F(LaunchHosts, TheFirstFailureEndsAllHosts) {
  const auto end = run_program(run({"--hosts", "node-a:2,node-b:2", "--grace", "1"},
                                   {"--pid", "--on-rank", "3", "--sleep", "0.3", "--print-err",
                                    "the cause", "--exit", "7", "--sleep", "60"}),
                               options());
  EXPECT_EQ(end.status, 7) << end.err;
  EXPECT_TRUE(contains(end.err, "[3] the cause\ntessera run: rank 3 failed first: exit status 7\n"))
      << end.err;
  const auto pids = numbers_after(end.out, "pid");
  EXPECT_EQ(pids.size(), 4U);
  EXPECT_TRUE(all_end(pids));
}

// Rank 0 sees at once that its peer is lost, and its launcher ends before the other's.
TEST_F(LaunchHosts, TheStatusIsThatOfTheRankWithTheCause) {
  const std::string script =
      "[ $RANK = 1 ] && { sleep 2; exit 4; }; "
      "printf '{\"rank\":0,\"size\":2,\"culprit\":1,\"reason\":\"lost\",\"records\":[]}' > "
      "$TESSERA_FLIGHT_DIR/rank_0.json; exit 5";
  const auto end = run_program(run_shell({"--hosts", "node-a:1,node-b:1"}, script), options());
  EXPECT_EQ(end.status, 4) << end.err;
  EXPECT_TRUE(contains(end.err,
                       "rank 1 is the cause, by the flight records of the others: the "
                       "launcher of its node says how it ended"))
      << end.err;
  EXPECT_TRUE(contains(end.err, "rank 1 failed first: exit status 4")) << end.err;
}

TEST_F(LaunchHosts, LeaveNoRankWhenMpirunIsKilled) {
  ProgramRun job(run({"--hosts", "node-a:2,node-b:1"}, {"--pid", "--child", "--sleep", "60"}),
                 options());
  ASSERT_TRUE(job.wait_for_output("pid ", 6)) << job.wait().err;
  job.signal(SIGKILL);
  const auto pids = numbers_after(job.wait().out, "pid");
  EXPECT_EQ(pids.size(), 6U);
  EXPECT_TRUE(all_end(pids));
}

TEST_F(LaunchHosts, PassSignalsOnToTheRanks) {
  ProgramRun job(run({"--hosts", "node-a:1,node-b:1"},
                     {"--tell", "15", "--tell", "12", "--print", "ready", "--wait-signal", "60",
                      "--wait-signal", "60", "--sleep", "0.3", "--print", "saved"}),
                 options());
  ASSERT_TRUE(job.wait_for_output("ready", 2)) << job.wait().err;
  job.signal(SIGUSR2);
  ASSERT_TRUE(job.wait_for_output("got 12", 2)) << job.wait().err;
  job.signal(SIGTERM);
  const auto end = job.wait();  // mpirun shows nothing that launchers say after SIGTERM
  for (const char* line : {"[0] got 15\n", "[1] got 15\n", "[0] saved\n", "[1] saved\n"})
    EXPECT_TRUE(contains(end.out, line)) << end.out << end.err;
}

TEST_F(LaunchHosts, ShowTheFlightRecordsThatAUserSignalAsksForOfEachNode) {
  const std::string script =
      "trap 'printf "
      "\"{\\\"rank\\\":%s,\\\"size\\\":2,\\\"reason\\\":\\\"SIGUSR1\\\",\\\"records\\\":[]}\" "
      "$RANK "
      "> $TESSERA_FLIGHT_DIR/new_$RANK; mv $TESSERA_FLIGHT_DIR/new_$RANK "
      "$TESSERA_FLIGHT_DIR/rank_$RANK.json' "
      "USR1; "
      "echo ready; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 0.1; done; echo done";
  ProgramRun job(run_shell({"--hosts", "node-a:1,node-b:1", "--log-dir", path("logs")}, script),
                 options());
  ASSERT_TRUE(job.wait_for_output("ready", 2)) << job.wait().err;
  job.signal(SIGUSR1);
  const auto end = job.wait();
  EXPECT_EQ(end.status, 0) << end.err;
  for (const char* line : {"rank 0: step 0: SIGUSR1\n", "rank 1: step 0: SIGUSR1\n"})
    EXPECT_TRUE(contains(end.err, line)) << end.err;
  for (const char* name : {"logs/flight/flight.json", "logs/flight/flight_node_1.json"})
    EXPECT_TRUE(fs::exists(path(name))) << name;
}

TEST_F(LaunchHosts, NameAProgramThatIsNotThere) {
  Command command = run({"--hosts", "node-a:1,node-b:1", "--max-restarts", "3"}, {});
  command.back() = "./no_such_program";
  const auto end = run_program(command, options());
  EXPECT_EQ(end.status, 127);
  EXPECT_TRUE(contains(end.err, ": cannot execute './no_such_program'")) << end.err;
  EXPECT_FALSE(contains(end.err, "restart")) << end.err;
}

TEST_F(LaunchHosts, WithoutMpirunSayHowToGetItOrDoWithoutIt) {
  const auto end = run_program(run({"--hosts", "node-a:1"}, {}), options({{"PATH", "/nowhere"}}));
  EXPECT_EQ(end.status, 127);
  EXPECT_TRUE(contains(end.err, "--hosts needs mpirun of Open MPI (Debian: openmpi-bin)"))
      << end.err;
  EXPECT_TRUE(contains(end.err, "start `tessera run --nodes N --node-rank K")) << end.err;
}

}  // namespace launch_hosts_test
}  // namespace tessera
