// `tessera run` on one of several nodes.

#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "launched.h"

namespace tessera {
namespace launch_nodes_test {

Command on_node(int node, const Command& options, const Command& flags) {
  return launched(with({"--nodes", "2", "--node-rank", std::to_string(node)}, options), flags);
}

const Command kPlace = {"--env", "WORLD_SIZE",       "--env", "LOCAL_RANK",
                        "--env", "LOCAL_WORLD_SIZE", "--env", "MASTER_ADDR",
                        "--env", "MASTER_PORT",      "--env", "TESSERA_JOB",
                        "--env", "TESSERA_RESTART"};

TEST(LaunchNodes, TellRanksTheirPlaceInTheWholeJob) {
  const auto end = run_program(on_node(1, {"--master", "host-a:23456", "-n", "2"}, kPlace));
  EXPECT_EQ(end.status, 0) << end.err;
  for (const char* line :
       {"[2] WORLD_SIZE=4\n", "[3] WORLD_SIZE=4\n", "[2] LOCAL_RANK=0\n", "[3] LOCAL_RANK=1\n",
        "[3] LOCAL_WORLD_SIZE=2\n", "[2] MASTER_ADDR=host-a\n", "[2] MASTER_PORT=23456\n",
        "[3] TESSERA_JOB=host-a:23456\n"}) {
    EXPECT_TRUE(contains(end.out, line)) << line << end.out;
  }
}

TEST(LaunchNodes, MayHaveDifferentNumbersOfRanksAndAnAgreedJob) {
  const auto end = run_program(
      on_node(1, {"--master", "[fd00::1]:23456", "--node-ranks", "3,1", "--job", "blue"}, kPlace));
  EXPECT_EQ(end.status, 0) << end.err;
  for (const char* line : {"[3] WORLD_SIZE=4\n", "[3] LOCAL_WORLD_SIZE=1\n",
                           "[3] MASTER_ADDR=fd00::1\n", "[3] TESSERA_JOB=blue\n"}) {
    EXPECT_TRUE(contains(end.out, line)) << line << end.out;
  }
}

TEST(LaunchNodes, TakeTheirNumberFromThoseWhoStartThem) {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"}) {
    const auto end =
        run_program(launched({"--nodes", "2", "--master", "a:23456", "-n", "1"}, {"--env", "RANK"}),
                    {.environment = {{name, "1"}}});
    EXPECT_EQ(end.out, "[1] RANK=1\n") << name << end.err;
  }
}

TEST(LaunchNodes, RestartWithAJobTextThatAllNodesKnow) {
  const auto end = run_program(on_node(1, {"--master", "a:23456", "-n", "1", "--max-restarts", "1"},
                                       with(kPlace, {"--on-restart", "0", "--exit", "3"})));
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_TRUE(contains(end.out, "[1] TESSERA_JOB=a:23456\n")) << end.out;
  EXPECT_TRUE(contains(end.out, "[1] TESSERA_JOB=a:23456.1\n[1] TESSERA_RESTART=1\n")) << end.out;
}

TEST(LaunchNodes, EachJobOfOneMachineHasATextOfItsOwn) {
  const Command command =
      launched({"-n", "2", "--max-restarts", "1"},
               {"--env", "TESSERA_JOB", "--on-restart", "0", "--sleep", "0.2", "--exit", "1"});
  std::map<std::string, int> texts;
  for (int start = 0; start < 2; ++start) {
    std::istringstream lines(run_program(command).out);
    for (std::string line; std::getline(lines, line);) ++texts[line.substr(line.find(' '))];
  }
  EXPECT_EQ(texts.size(), 4U);
  for (const auto& [text, count] : texts) {
    EXPECT_EQ(count, 2) << text;
    EXPECT_GT(text.size(), 20U);
  }
}

TEST(LaunchNodes, OptionsThatContradictEachOtherAreRefusedWithAReason) {
  const std::vector<std::pair<Command, std::string>> cases = {
      {{"--hosts", "a:1", "--nodes", "2"}, "--hosts starts the launchers of all nodes"},
      {{"--hosts", "a:1", "--job", "x"}, "--job: --hosts"},
      {{"--hosts", "a:1", "-n", "3"}, "expected no -n"},
      {{"--hosts", "a"}, "a:RANKS"},
      {{"--hosts", "a:1,a:2"}, "named twice"},
      {{"--hosts", "a:0"}, "from 1"},
      {{"--hosts", "::1:2"}, "brackets"},
      {{"--hosts=-a:2"}, "name of a host"},
      {{"--hosts", "user@a:1"}, "~/.ssh/config"},
      {{"--hosts", "a:1", "--interrupt-grace", "5"}, "a second after SIGTERM"},
      {{"--hosts", "[::1]:1"}, "~/.ssh/config"},
      {{"--hosts", "a:1", "--master", "a:1", "--master-port", "2"}, "one of them"},
      {{"--master", "a"}, "--nodes or --hosts"},
      {{"--job", "x"}, "--nodes"},
      {{"--node-rank", "0"}, "--nodes"},
      {{"--ssh", "x"}, "--hosts"},
      {{"--env", "X"}, "--hosts"},
      {{"--nodes", "2", "--node-rank", "0", "-n", "1"}, "--master"},
      {{"--nodes", "2", "--master", "a", "-n", "1"}, "--node-rank"},
      {{"--nodes", "2", "--node-rank", "2", "--master", "a", "-n", "1"}, "less than"},
      {{"--nodes", "2", "--node-rank", "0", "--master", "a"}, "-n"},
      {{"--nodes", "2", "--node-rank", "0", "--master", "a", "--node-ranks", "1"},
       "each of 2 nodes"},
      {{"--nodes", "1", "--node-rank", "0", "--master", "a", "--node-ranks", "1", "-n", "1"},
       "one of them"},
  };
  for (const auto& [options, reason] : cases) {
    const auto end = run_program(with(with({TESSERA_CLI, "run"}, options), {"true"}));
    EXPECT_EQ(end.status, 2) << reason;
    EXPECT_TRUE(contains(end.err, reason)) << reason << "\n" << end.err;
  }
}

}  // namespace launch_nodes_test
}  // namespace tessera
