// The words that the command-line tool understands, and its answers to others.

#include <gtest/gtest.h>

#include <filesystem>

#include "launched.h"

namespace tessera::command_line_test {

ProgramEnd tool(const Command& arguments) { return run_program(with({TESSERA_CLI}, arguments)); }

TEST(CommandLine, PrintsHelpAloneAndForEachCommand) {
  for (const Command& arguments :
       {Command{}, {"--help"}, {"bench"}, {"run", "--help"}, {"bench", "step", "--help"}}) {
    const auto end = tool(arguments);
    EXPECT_EQ(end.status, 0) << end.err;
    EXPECT_TRUE(contains(end.out, "Usage: tessera")) << end.out;
  }
  EXPECT_TRUE(contains(tool({"run", "-h"}).out, "--max-restarts"));
}

TEST(CommandLine, PrintsVersions) {
  for (const std::string argument : {"version", "--version"}) {
    const auto end = tool({argument});
    EXPECT_EQ(end.status, 0) << end.err;
    for (const char* line :
         {"tessera 0.", " (LibTorch 2.", "\nLibTorch 2.", " is loaded\n",
          "\nbuilt with LibTorch 2.", ", build type ", "\nbackends: arena, gloo"})
      EXPECT_TRUE(contains(end.out, line)) << line << " is missing in:\n" << end.out;
    EXPECT_EQ(end.out.find("tessera "), end.out.rfind("tessera ")) << end.out;
  }
}

// Jobs start without tessera-bench, and reports of errors come from there, too.
TEST(CommandLine, PrintsItsOwnVersionWithoutTheProgramThatLoadsLibTorch) {
  const TemporaryDirectory directory;
  const std::string alone = directory.path() + "/tessera";
  std::filesystem::copy_file(TESSERA_CLI, alone);
  const auto end = run_program({alone, "--version"});
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_EQ(end.out.find("tessera 0."), 0) << end.out;
  EXPECT_TRUE(contains(end.out, "which is not there: " + directory.path())) << end.out;
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

}  // namespace tessera::command_line_test
