// How `tessera run` shows and keeps the ranks' output.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "launched.h"
#include "launcher/rank_stream.h"

namespace tessera::rank_output_test {

TEST(RankOutput, PrefixesEveryLineAndKeepsTheStreamsApart) {
  const auto end =
      run_program(launched({"-n", "2"}, {"--print", "to stdout", "--print-err", "to stderr"}));
  EXPECT_EQ(end.status, 0);
  for (const std::string rank : {"0", "1"}) {
    EXPECT_TRUE(contains(end.out, "[" + rank + "] to stdout\n")) << end.out;
    EXPECT_TRUE(contains(end.err, "[" + rank + "] to stderr\n")) << end.err;
  }
  EXPECT_FALSE(contains(end.out, "stderr"));
  EXPECT_FALSE(contains(end.err, "tessera run"));
}

TEST(RankOutput, KeepsLinesWholeWhateverOtherRanksWrite) {
  const auto end = run_program(launched({"-n", "4"}, {"--lines", "3000"}));
  std::map<std::string, int> next;
  std::istringstream lines(end.out);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const std::string rank = line.substr(1, 1);
    ASSERT_EQ(line, "[" + rank + "] line " + std::to_string(next[rank]++) + " of rank " + rank);
  }
  EXPECT_EQ(count, 12000);
}

TEST(RankOutput, ShowsLongLinesInOnePiece) {
  const auto end = run_program(launched({"-n", "2"}, {"--long-line", "3000000"}));
  EXPECT_TRUE(contains(end.out, "[0] " + std::string(3000000, 'a') + "\n"));
  EXPECT_TRUE(contains(end.out, "[1] " + std::string(3000000, 'b') + "\n"));
  EXPECT_EQ(end.out.size(), 2U * 3000005U);
}

TEST(RankOutput, PassesAnyByteOn) {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes.push_back(static_cast<char>(byte));
  bytes.push_back('\n');
  const auto end = run_program(launched({"-n", "1"}, {"--binary"}));
  EXPECT_EQ(end.out, "[0] " + bytes.substr(0, 11) + "[0] " + bytes.substr(11));
}

TEST(RankOutput, EndsALastLineThatHasNoEnd) {
  const auto end = run_program(launched({"-n", "1"}, {"--print-raw", "no newline"}));
  EXPECT_EQ(end.out, "[0] no newline\n");
}

TEST(RankOutput, HasNoPrefixIfAsked) {
  const auto end = run_program(launched({"-n", "1", "--no-prefix"}, {"--print", "bare"}));
  EXPECT_EQ(end.out, "bare\n");
}

TEST(RankOutput, ColoursThePrefixOnATerminalOnly) {
  const Command command = launched({"-n", "2"}, {"--print", "hello"});
  const auto coloured =
      run_program(command, {.environment = {{"NO_COLOR", ""}}, .on_terminal = true});
  EXPECT_TRUE(contains(coloured.out, "\033[36m[0]\033[0m hello")) << coloured.out;
  EXPECT_TRUE(contains(coloured.out, "\033[32m[1]\033[0m hello")) << coloured.out;
  const auto plain =
      run_program(command, {.environment = {{"NO_COLOR", "1"}}, .on_terminal = true});
  EXPECT_FALSE(contains(plain.out, "\033")) << plain.out;
}

TEST(RankOutput, KeepsBytesOfEachRankInTheLogDirectory) {
  const TemporaryDirectory directory;
  const std::string logs = directory.path("new/logs");
  const auto end = run_program(
      launched({"-n", "2", "--log-dir", logs},
               {"--print", "out", "--print-err", "err", "--on-rank", "1", "--print-raw", "end"}));
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_EQ(read_file(logs + "/rank_0.out"), "out\n");
  EXPECT_EQ(read_file(logs + "/rank_1.out"), "out\nend");
  EXPECT_EQ(read_file(logs + "/rank_1.err"), "err\n");
  EXPECT_TRUE(contains(end.out, "[1] out\n")) << "logs do not replace the terminal";
}

TEST(RankOutput, ShowsRankZeroOnlyWhenQuiet) {
  const TemporaryDirectory directory;
  const auto end = run_program(launched({"-n", "2", "--quiet", "--log-dir", directory.path()},
                                        {"--print", "out", "--print-err", "err"}));
  EXPECT_EQ(end.out, "[0] out\n");
  EXPECT_EQ(end.err, "[0] err\n");
  EXPECT_EQ(read_file(directory.path("rank_1.out")), "out\n");
}

TEST(RankOutput, NamesALogDirectoryThatCannotBeMade) {
  const auto end =
      run_program(launched({"-n", "1", "--log-dir", "/proc/none"}, {"--print", "started"}));
  EXPECT_EQ(end.status, 1);
  EXPECT_TRUE(contains(end.err, "/proc/none")) << end.err;
  EXPECT_EQ(end.out, "");
}

TEST(RankOutput, WritesNoLogThroughALink) {
  const TemporaryDirectory directory;
  const std::string target = directory.path("target");
  std::ofstream(target) << "kept";
  std::filesystem::create_symlink(target, directory.path("rank_0.err"));
  const auto end =
      run_program(launched({"-n", "1", "--log-dir", directory.path()}, {"--print", "started"}));
  EXPECT_EQ(end.status, 1);
  EXPECT_TRUE(contains(end.err, "rank_0.err', as it is a link")) << end.err;
  EXPECT_EQ(read_file(target), "kept");
}

TEST(RankOutput, GivesInputToRankZeroOnly) {
  const auto end =
      run_program(launched({"-n", "2"}, {"--echo-input"}), {.input = "first\nsecond\n"});
  EXPECT_EQ(end.out, "[0] first\n[0] second\n");
}

TEST(RankOutput, EndsTheJobWhenItsReaderHasGone) {
  const auto end = run_program({"bash", "-c",
                                std::string(TESSERA_CLI) + " run -n 2 yes | head -n 1; "
                                                           "echo \"status ${PIPESTATUS[0]}\""});
  EXPECT_TRUE(contains(end.out, "status 141")) << end.out << end.err;
}

TEST(RankOutput, ThatAFullDiskLosesEndsNoRank) {
  const TemporaryDirectory directory;
  const auto run = [&](const std::string& to) {
    const std::string program =
        " run -n 2 sh -c 'seq 20000; sleep 0.5; echo more; touch " + directory.path() + "$0$RANK' ";
    return run_program({"bash", "-c", TESSERA_CLI + program + to + "; echo status $? >&2"});
  };
  const auto end = run("a >/dev/full");
  EXPECT_TRUE(contains(end.err, "tessera run: cannot write to stdout: No space left on device"));
  EXPECT_TRUE(contains(end.err, "bytes of output could not be written and are lost")) << end.err;
  EXPECT_EQ(last_line(end.err), "status 1") << end.err;
  EXPECT_EQ(last_line(run("b >/dev/full 2>/dev/full").err), "status 1");
  for (const char* const rank : {"a0", "a1", "b0", "b1"})
    EXPECT_EQ(::access(directory.path(rank).c_str(), F_OK), 0) << rank << " did not end in order";
}

/// Lets ranks print to a terminal, and returns the text that it shows.
std::string shown_for(const std::vector<std::pair<int, std::string>>& writes) {
  ProgramRun::Options options{.on_terminal = true};
  options.environment["NO_COLOR"] = "1";
  Command flags;
  for (const auto& [rank, text] : writes) {
    flags.insert(flags.end(), {"--on-rank", std::to_string(rank), "--print-raw", text});
  }
  return run_program(launched({"-n", "2"}, flags), options).out;
}

TEST(RankOutput, UpdatesAProgressLineOnATerminalInPlace) {
  EXPECT_EQ(shown_for({{0, "1%\r"}, {0, "2%\r"}, {0, "done\n"}}), "[0] 1%\r[0] 2%\r[0] done\r\n");
  EXPECT_EQ(shown_for({{0, "with both\r\n"}, {0, "next\n"}}), "[0] with both\r\r\n[0] next\r\n");
}

TEST(RankStream, CutsALineWithoutEndAtItsLongest) {
  tools::Terminal terminal;
  tools::Pipe pipe;
  std::vector<size_t> sizes;
  tools::RankStream stream(
      std::move(pipe.read_end),
      {.on_line = [&](std::string_view line) { sizes.push_back(line.size()); }}, terminal);
  const std::string piece(1 << 15, 'x');
  size_t written = 0;
  while (sizes.empty() && written < 2 * tools::RankStream::kLongestLine) {
    written += ::write(pipe.write_end.get(), piece.data(), piece.size());
    stream.read_some();
  }
  ASSERT_EQ(sizes.size(), 1U);
  EXPECT_EQ(sizes[0], tools::RankStream::kLongestLine);
}

TEST(Terminal, EndsTheProgressLineOfAnotherSource) {
  tools::Terminal terminal;
  tools::Pipe pipe;
  const int first = 0, second = 0;
  terminal.write_from(&first, pipe.write_end.get(), "1%\r");
  terminal.write_from(&first, pipe.write_end.get(), "2%\r");
  terminal.write_from(&second, pipe.write_end.get(), "other\n");
  while (terminal.pending()) terminal.write_some();
  char buffer[64];
  const ssize_t count = ::read(pipe.read_end.get(), buffer, sizeof(buffer));
  EXPECT_EQ(std::string(buffer, count), "1%\r2%\r\nother\n");
}

}  // namespace tessera::rank_output_test
