// `tessera run` when ranks fail.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "launched.h"

namespace tessera::rank_failure_test {

TEST(RankFailure, EndsTheOthersAndNamesTheFirstLast) {
  const auto end =
      run_program(launched({"-n", "4"}, {"--pid", "--on-rank", "2", "--sleep", "0.2", "--exit", "3",
                                         "--on-rank", "0", "--sleep", "600", "--on-rank", "1",
                                         "--sleep", "600", "--on-rank", "3", "--sleep", "600"}));
  EXPECT_EQ(end.status, 3);
  EXPECT_EQ(last_line(end.err), "tessera run: rank 2 failed first: exit status 3");
  const auto pids = numbers_after(end.out, "pid");
  EXPECT_EQ(pids.size(), 4U);
  EXPECT_TRUE(all_end(pids));
}

TEST(RankFailure, NamesTheSignalThatKilledARank) {
  for (int signal : {SIGKILL, SIGSEGV, SIGTERM}) {
    const auto end =
        run_program(launched({"-n", "2"}, {"--on-rank", "1", "--kill", std::to_string(signal),
                                           "--on-rank", "0", "--sleep", "600"}));
    EXPECT_EQ(end.status, 128 + signal);
    const std::string line = last_line(end.err);
    EXPECT_TRUE(contains(line, "tessera run: rank 1 failed first: killed by signal " +
                                   std::to_string(signal) + " ("))
        << line;
  }
}

/// A control group with little memory; `path` is empty where none can be made.
struct SmallGroup {
  std::filesystem::path path;

  SmallGroup() {
    for (const auto& [parent, limit] : {std::pair{"/sys/fs/cgroup/memory", "memory.limit_in_bytes"},
                                        std::pair{"/sys/fs/cgroup", "memory.max"}}) {
      std::error_code error;
      const auto made = std::filesystem::path(parent) / ("tessera_" + std::to_string(::getpid()));
      if (!path.empty() || !std::filesystem::create_directory(made, error)) continue;
      if (std::ofstream(made / limit) << (64 << 20) << std::flush)
        path = made;
      else
        std::filesystem::remove(made, error);
    }
  }
  ~SmallGroup() {
    std::error_code error;
    if (!path.empty()) std::filesystem::remove(path, error);
  }
};

TEST(RankFailure, SaysThatTheKernelHadNoMemoryForARank) {
  const SmallGroup group;
  if (group.path.empty()) GTEST_SKIP() << "no control group of memory can be made here";
  const Command in_group = {"sh", "-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\"", group.path};
  const auto end =
      run_program(with(in_group, {TESSERA_CLI, "run", "-n", "2", "sh", "-c",
                                  "[ $RANK = 1 ] && exec tail /dev/zero; exec sleep 600"}));
  EXPECT_EQ(end.status, 128 + SIGKILL);
  EXPECT_EQ(last_line(end.err),
            "tessera run: rank 1 failed first: killed by signal 9 (Killed): out of memory, as the "
            "kernel counts");
}

TEST(RankFailure, BlamesTheFirstAlthoughOthersFailAfterIt) {
  const auto end = run_program(
      launched({"-n", "3", "--grace", "5"},
               {"--on-rank", "1", "--sleep", "0.1", "--exit", "7", "--on-rank", "0", "--sleep",
                "0.6", "--exit", "1", "--on-rank", "2", "--sleep", "0.5", "--kill", "6"}));
  EXPECT_EQ(end.status, 7);
  EXPECT_EQ(last_line(end.err), "tessera run: rank 1 failed first: exit status 7");
}

TEST(RankFailure, RepeatsTheLastLinesOfItsStderr) {
  const auto end = run_program(
      launched({"-n", "2"}, {"--on-rank", "1", "--print-err", "the cause", "--exit", "4",
                             "--on-rank", "0", "--sleep", "0.1", "--print-err", "other news"}));
  EXPECT_EQ(end.status, 4);
  EXPECT_TRUE(contains(end.err,
                       "tessera run: the last lines that rank 1 wrote to stderr:\n"
                       "    the cause\n"
                       "tessera run: rank 1 failed first: exit status 4\n"))
      << end.err;
}

TEST(RankFailure, DoesNotRepeatLinesThatAreTheLastShown) {
  const auto end = run_program(launched({"-n", "1"}, {"--print-err", "the cause", "--exit", "4"}));
  EXPECT_EQ(end.err, "[0] the cause\ntessera run: rank 0 failed first: exit status 4\n");
}

TEST(RankFailure, LetsTheOthersSayWhatTheySaw) {
  const auto end = run_program(launched(
      {"-n", "2", "--grace", "5"}, {"--on-rank", "1", "--exit", "4", "--on-rank", "0", "--sleep",
                                    "0.3", "--print", "peer lost", "--exit", "1"}));
  EXPECT_EQ(end.status, 4);
  EXPECT_TRUE(contains(end.out, "[0] peer lost\n"));
}

TEST(RankFailure, RepeatsTheLastWordsOfTheOthersAfterTheCause) {
  const auto end = run_program({TESSERA_CLI,
                                "run",
                                "-n",
                                "3",
                                RANK_PROBE,
                                "--on-rank",
                                "1",
                                "--print-err",
                                "the cause",
                                "--kill",
                                "9",
                                "--on-rank",
                                "0",
                                "--sleep",
                                "2",
                                "--print-err",
                                "first",
                                "--print-err",
                                "second",
                                "--print-err",
                                "rank 1 has died",
                                "--exit",
                                "1",
                                "--on-rank",
                                "2",
                                "--sleep",
                                "3.5",
                                "--print-err",
                                "rank 1 is gone",
                                "--exit",
                                "1"});
  EXPECT_EQ(end.status, 137);
  EXPECT_TRUE(contains(end.err,
                       "    the cause\n"
                       "tessera run: rank 1 failed first: killed by signal 9 (Killed)\n"
                       "tessera run: rank 0 failed, too: exit status 1:\n"
                       "    second\n"
                       "    rank 1 has died\n"
                       "tessera run: rank 2 failed, too: exit status 1:\n"
                       "    rank 1 is gone\n"))
      << end.err;
}

TEST(RankFailure, NamesARankThatWasStopped) {
  const auto end = run_program(
      launched({"-n", "3"}, {"--on-rank", "2", "--kill", std::to_string(SIGSTOP), "--on-rank", "1",
                             "--sleep", "600", "--on-rank", "0", "--sleep", "0.5", "--exit", "4"}));
  EXPECT_EQ(end.status, 4);
  EXPECT_TRUE(contains(end.err,
                       "tessera run: rank 2 is the cause: stopped by signal 19 (Stopped (signal))\n"
                       "tessera run: rank 0 failed first: exit status 4\n"))
      << end.err;
}

TEST(RankFailure, BlamesNoRankWhereAllFailAlike) {
  const auto end = run_program(launched({"-n", "3"}, {"--exit", "4"}));
  EXPECT_EQ(end.status, 4);
  const std::string line = last_line(end.err);
  EXPECT_TRUE(line.starts_with("tessera run: all ranks failed alike, rank ") &&
              line.ends_with(" first: exit status 4"))
      << line;
}

TEST(RankFailure, DoesNotWaitLongForRanksThatSayNothing) {
  const auto end = run_program({TESSERA_CLI, "run", "-n", "2", RANK_PROBE, "--on-rank", "1",
                                "--exit", "3", "--on-rank", "0", "--sleep", "600"});
  EXPECT_EQ(end.status, 3);
  EXPECT_GT(end.seconds, 2.5);
  EXPECT_LT(end.seconds, 4.7);
}

TEST(RankFailure, TerminatesFirstAndKillsThen) {
  const auto end =
      run_program(launched({"-n", "3"}, {"--pid", "--on-rank", "0", "--sleep", "0.1", "--exit", "5",
                                         "--on-rank", "1", "--tell", "15", "--wait-signal", "600",
                                         "--on-rank", "2", "--ignore", "15", "--sleep", "600"}));
  EXPECT_EQ(end.status, 5);
  EXPECT_TRUE(contains(end.out, "[1] got 15\n")) << end.out;
  EXPECT_GT(end.seconds, 0.6) << "grace before SIGTERM and again before SIGKILL";
  EXPECT_TRUE(all_end(numbers_after(end.out, "pid")));
}

TEST(RankFailure, EndsWhatTheRanksStarted) {
  const auto end = run_program(launched({"-n", "2"}, {"--child", "--on-rank", "1", "--exit", "2",
                                                      "--on-rank", "0", "--sleep", "600"}));
  EXPECT_EQ(end.status, 2);
  const auto children = numbers_after(end.out, "pid");
  EXPECT_EQ(children.size(), 2U);
  EXPECT_TRUE(all_end(children));
}

TEST(RankFailure, EndsWhatSuccessfulRanksLeaveBehind) {
  const auto end = run_program(launched({"-n", "2"}, {"--child"}));
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_TRUE(all_end(numbers_after(end.out, "pid")));
}

TEST(RankFailure, RepeatsTheMessageAndNotTheFramesOfTheStack) {
  std::vector<std::string> arguments{"--print-err", "what(): expected 3, got 4"};
  for (int i = 0; i < 20; ++i) {
    arguments.push_back("--print-err");
    arguments.push_back("frame #" + std::to_string(i) + ": a function (0x1234)");
  }
  arguments.insert(arguments.end(), {"--exit", "1"});
  const auto end = run_program(launched({"-n", "1"}, arguments));
  EXPECT_TRUE(contains(end.err,
                       "tessera run: the last lines that rank 0 wrote to stderr:\n"
                       "    what(): expected 3, got 4\n"
                       "tessera run: rank 0 failed first"))
      << end.err;
}

TEST(RankFailure, LeavesNoRankWhenTheLauncherIsKilled) {
  ProgramRun run(launched({"-n", "3"}, {"--pid", "--child", "--sleep", "600"}));
  ASSERT_TRUE(run.wait_for_output("pid ", 6));
  run.signal(SIGKILL);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 137);
  const auto pids = numbers_after(end.out, "pid");
  EXPECT_EQ(pids.size(), 6U);
  EXPECT_TRUE(all_end(pids));
}

TEST(RankFailure, NamesAProgramThatIsNotThere) {
  const auto end = run_program({TESSERA_CLI, "run", "-n", "2", "./no_such_program"});
  EXPECT_EQ(end.status, 127);
  EXPECT_EQ(
      end.err,
      "tessera run: cannot execute './no_such_program': No such file or directory (errno 2)\n");
}

TEST(RankFailure, NamesAProgramThatMayNotBeExecuted) {
  const auto end = run_program({TESSERA_CLI, "run", "-n", "2", "--max-restarts", "3", "/dev/null"});
  EXPECT_EQ(end.status, 126);
  EXPECT_EQ(end.err, "tessera run: cannot execute '/dev/null': Permission denied (errno 13)\n");
}

TEST(Restart, StartsAllRanksAgainUntilTheySucceed) {
  const auto end = run_program(
      launched({"-n", "2", "--max-restarts", "3"},
               {"--env", "TESSERA_RESTART", "--env", "MASTER_PORT", "--on-restart", "0", "--sleep",
                "0.1", "--on-restart", "1", "--exit", "6", "--on-restart", "0", "--exit", "6"}));
  EXPECT_EQ(end.status, 0) << end.err;
  for (const std::string rank : {"0", "1"}) {
    EXPECT_TRUE(contains(end.out, "[" + rank + "] TESSERA_RESTART=2\n")) << end.out;
  }
  EXPECT_TRUE(contains(end.err, "tessera run: restart 1 of 3: starting all 2 ranks again, port "))
      << end.err;
  EXPECT_TRUE(contains(end.err, "tessera run: restart 2 of 3")) << end.err;
  EXPECT_FALSE(contains(end.err, "restart 3 of 3"));
}

TEST(Restart, GivesUpAfterTheLastOne) {
  const auto end =
      run_program(launched({"-n", "2", "--max-restarts", "1"}, {"--on-rank", "1", "--exit", "8"}));
  EXPECT_EQ(end.status, 8);
  EXPECT_TRUE(contains(end.err, "restart 1 of 1"));
  EXPECT_EQ(last_line(end.err), "tessera run: rank 1 failed first: exit status 8");
}

TEST(Restart, ContinuesTheLogs) {
  const TemporaryDirectory directory;
  run_program(launched({"-n", "1", "--max-restarts", "1", "--log-dir", directory.path()},
                       {"--env", "TESSERA_RESTART", "--exit", "1"}));
  EXPECT_EQ(read_file(directory.path("rank_0.out")),
            "TESSERA_RESTART=0\n--- tessera run: restart 1 ---\nTESSERA_RESTART=1\n");
}

TEST(Restart, IsNotDoneAfterAnInterrupt) {
  ProgramRun run(launched({"-n", "2", "--max-restarts", "5"}, {"--pid", "--sleep", "600"}));
  ASSERT_TRUE(run.wait_for_output("pid ", 2));
  run.signal(SIGTERM);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 143);
  EXPECT_FALSE(contains(end.err, "restart")) << end.err;
}

}  // namespace tessera::rank_failure_test
