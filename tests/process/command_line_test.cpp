// The words that the command-line tool understands, and its answers to others.

#include <gtest/gtest.h>

#include "launched.h"

namespace tessera {
namespace command_line_test {

ProgramEnd tool(const Command& arguments) { return run_program(with({TESSERA_CLI}, arguments)); }

TEST(CommandLine, PrintsHelpAloneAndForEachCommand) {
  for (const Command& arguments :
       {Command{}, {"--help"}, {"bench"}, {"run", "--help"}, {"bench", "comm", "--help"}}) {
    const auto end = tool(arguments);
    EXPECT_EQ(end.status, 0) << end.err;
    EXPECT_TRUE(contains(end.out, "Usage: tessera")) << end.out;
  }
  EXPECT_TRUE(contains(tool({"run", "-h"}).out, "--max-restarts"));
}

TEST(CommandLine, PrintsVersions) {
  const auto end = tool({"version"});
  EXPECT_EQ(end.status, 0);
  EXPECT_TRUE(contains(end.out, "tessera ")) << end.out;
  EXPECT_TRUE(contains(end.out, "LibTorch 2.")) << end.out;
}

TEST(CommandLine, AnswersWrongUsageWithStatusTwo) {
  const std::vector<std::pair<Command, std::string>> cases = {
      {{"unknown"}, "unknown"},
      {{"--unknown"}, "--unknown"},
      {{"run"}, "PROGRAM"},
      {{"run", "-n", "2"}, "PROGRAM"},
      {{"run", "-n", "2", "--"}, "PROGRAM"},
      {{"run", "--unknown", "true"}, "--unknown"},
      {{"run", "-n", "0", "true"}, "--ranks"},
      {{"run", "-n", "-3", "true"}, "--ranks"},
      {{"run", "-n", "two", "true"}, "--ranks"},
      {{"run", "-n"}, "--ranks"},
      {{"run", "--bind", "threads", "true"}, "--bind"},
      {{"run", "--master-port", "70000", "true"}, "--master-port"},
      {{"run", "--max-restarts", "-1", "true"}, "--max-restarts"},
      {{"run", "--quiet", "true"}, "--log-dir"},
      {{"bench", "unknown"}, "unknown"},
  };
  for (const auto& [arguments, named] : cases) {
    const auto end = tool(arguments);
    EXPECT_EQ(end.status, 2) << named;
    EXPECT_EQ(end.out, "") << named;
    EXPECT_TRUE(contains(end.err, named)) << end.err;
    EXPECT_TRUE(contains(end.err, "Usage: tessera")) << end.err;
  }
}

TEST(CommandLine, LeavesTheArgumentsOfTheProgramAlone) {
  const Command program = {"printf", "<%s>", "-n",     "7", "--quiet",
                           "bench",  "--",   "--help", "",  "a b"};
  for (Command arguments :
       {Command{"run", "-n1"}, {"run", "--ranks=1"}, {"run", "-n", "1", "--"}}) {
    arguments.insert(arguments.end(), program.begin(), program.end());
    EXPECT_EQ(tool(arguments).out, "[0] <-n><7><--quiet><bench><--><--help><><a b>\n");
  }
}

TEST(CommandLine, RunsAProgramThatIsCalledLikeACommand) {
  const TemporaryDirectory directory;
  const auto end = run_program({TESSERA_CLI, "run", "-n", "1", "bench"},
                               {.environment = {{"PATH", directory.path() + ":/usr/bin:/bin"}}});
  EXPECT_EQ(end.status, 127);
  EXPECT_TRUE(contains(end.err, "cannot execute 'bench'")) << end.err;
}

}  // namespace command_line_test
}  // namespace tessera
