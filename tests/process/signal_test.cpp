// How `tessera run` treats the signals that it gets itself.

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <thread>

#include "launched.h"

namespace tessera::signal_test {

TEST(Signal, IsPassedOnToAllRanks) {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const std::string number = std::to_string(signal);
    ProgramRun run(launched({"-n", "3"}, {"--tell", number, "--print", "ready", "--wait-signal",
                                          "60", "--print", "saved"}));
    ASSERT_TRUE(run.wait_for_output("ready", 3));
    run.signal(signal);
    const auto end = run.wait();
    const std::string got = "got " + std::string(signal < 10 ? "0" : "") + number;
    for (const std::string rank : {"[0] ", "[1] ", "[2] "}) {
      EXPECT_TRUE(contains(end.out, rank + got + "\n")) << end.out;
      EXPECT_TRUE(contains(end.out, rank + "saved\n")) << end.out;
    }
    EXPECT_EQ(end.status, 0) << "all ranks ended well";
    EXPECT_TRUE(contains(end.err, "tessera run: interrupted by signal " + number)) << end.err;
  }
}

TEST(Signal, GivesItsStatusToAJobThatItEnds) {
  ProgramRun run(launched({"-n", "2"}, {"--pid", "--sleep", "600"}));
  ASSERT_TRUE(run.wait_for_output("pid ", 2));
  run.signal(SIGINT);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 130);
  EXPECT_EQ(last_line(end.err), "tessera run: interrupted by signal 2 (Interrupt)");
}

TEST(Signal, KillsAtTheSecondInterrupt) {
  ProgramRun run(
      launched({"-n", "2"}, {"--tell", "2", "--ignore", "15", "--pid", "--sleep", "600"}));
  ASSERT_TRUE(run.wait_for_output("pid ", 2));
  run.signal(SIGINT);
  ASSERT_TRUE(run.wait_for_output("got 02", 2));
  run.signal(SIGINT);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 130);
  EXPECT_TRUE(all_end(numbers_after(end.out, "pid")));
}

TEST(Signal, EndsRanksThatIgnoreItAfterAWhile) {
  ProgramRun run(launched({"-n", "2", "--interrupt-grace", "0.3"},
                          {"--ignore", "1", "--ignore", "15", "--pid", "--sleep", "600"}));
  ASSERT_TRUE(run.wait_for_output("pid ", 2));
  run.signal(SIGHUP);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 129);
  EXPECT_TRUE(all_end(numbers_after(end.out, "pid")));
}

TEST(Signal, OfTheUserEndsNothing) {
  ProgramRun run(
      launched({"-n", "2"}, {"--tell", "10", "--print", "ready", "--wait-signal", "600"}));
  ASSERT_TRUE(run.wait_for_output("ready", 2));
  run.signal(SIGUSR1);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 0);
  EXPECT_TRUE(contains(end.out, "[1] got 10\n")) << end.out;
  EXPECT_EQ(end.err, "");
}

TEST(Signal, StopsAndContinuesTheRanksWithTheLauncher) {
  ProgramRun run(launched({"-n", "2"}, {"--pid", "--sleep", "1.5", "--print", "done"}));
  ASSERT_TRUE(run.wait_for_output("pid ", 2));
  auto pids = numbers_after(run.output(), "pid");
  pids.push_back(run.pid());
  const auto all_are = [&](const std::string& states) {
    for (int i = 0; i < 1000; ++i) {
      bool all = true;
      for (pid_t pid : pids) all = all && contains(states, std::string(1, process_state(pid)));
      if (all) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  };
  run.signal(SIGTSTP);
  EXPECT_TRUE(all_are("T"));
  run.signal(SIGCONT);
  EXPECT_TRUE(all_are("SR"));
  const auto end = run.wait();
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_TRUE(contains(end.out, "[1] done\n"));
}

TEST(Signal, ThatWasIgnoredStaysIgnored) {
  ProgramRun run({"nohup", TESSERA_CLI, "run", "-n", "1", RANK_PROBE, "--print", "ready", "--sleep",
                  "0.5", "--print", "done"});
  ASSERT_TRUE(run.wait_for_output("ready"));
  run.signal(SIGHUP);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_TRUE(contains(end.out, "[0] done\n"));
}

TEST(Signal, EndsAJobWhoseOutputNobodyReads) {
  ProgramRun run(launched({"-n", "2"}, {"--pid", "--long-line", "8000000", "--sleep", "600"}));
  ASSERT_TRUE(run.wait_for_output("pid ", 2));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // all pipes are full now
  run.signal(SIGTERM);                                          // ends the ranks
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const auto pids = numbers_after(run.output(), "pid");
  EXPECT_EQ(pids.size(), 2U);
  EXPECT_TRUE(all_end(pids));
  for (int i = 0; i < 100 && is_running(run.pid()); ++i) {
    run.signal(SIGTERM);  // ends the wait for a reader, once it has begun
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_FALSE(is_running(run.pid()));
  EXPECT_EQ(run.wait().status, 143);
}

}  // namespace tessera::signal_test
