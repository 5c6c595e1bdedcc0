// The line that shows how far a run is.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/loop/progress_line.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <regex>
#include <thread>

#include "support/error_of.h"
#include "support/run_world.h"

namespace tessera::testing {
namespace progress_line_test {

using namespace std::chrono_literals;

// The text that `f` prints to a file.
template <class F>
std::string printed(F&& f) {
  std::FILE* file = std::tmpfile();
  f(file);
  std::rewind(file);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

TEST(ProgressLine, ShowsStepsTextPaceAndTimeLeft) {
  const std::string text = printed([](std::FILE* file) {
    ProgressLine progress(400, {.out = file, .every = 0s});
    progress.show(0);
    std::this_thread::sleep_for(5ms);
    progress.show(100, "loss 2.131");
    progress.show(400, "loss 2.0");
  });
  EXPECT_TRUE(std::regex_match(
      text, std::regex("step 0/400 0%\n"
                       "step 100/400 25%  loss 2.131  \\d+\\.\\d steps/s  \\d+ s left\n"
                       "step 400/400 100%  loss 2.0  \\d+\\.\\d steps/s\n")))
      << text;
}

TEST(ProgressLine, PrintsSeldomToAFileAndTheLastStepAlways) {
  const std::string text = printed([](std::FILE* file) {
    ProgressLine progress(50, {.out = file, .every = 1h});
    for (int step = 1; step <= 50; ++step) progress.show(step);
  });
  EXPECT_TRUE(std::regex_match(text, std::regex("step 1/50 2%\nstep 50/50 100%.*\n"))) << text;
}

TEST(ProgressLine, FitsEightyColumns) {
  const std::string text = printed([](std::FILE* file) {
    ProgressLine progress(1'000'000'000, {.out = file, .every = 0s});
    progress.show(1);
    std::this_thread::sleep_for(2ms);
    progress.show(2, std::string(200, 'x'));
  });
  const size_t second = text.find('\n') + 1;
  EXPECT_EQ(text.size() - second, 76u + 1) << text;
  EXPECT_NE(text.find(" left\n"), std::string::npos) << text;
}

TEST(ProgressLine, EachLineTakesThePlaceOfTheOneBeforeOnATerminal) {
  const int master = ::posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(master, 0);
  ASSERT_EQ(::grantpt(master), 0);
  ASSERT_EQ(::unlockpt(master), 0);
  std::FILE* terminal = std::fopen(::ptsname(master), "w");
  ASSERT_NE(terminal, nullptr);
  {
    ProgressLine progress(2, {.out = terminal});
    progress.show(1);
    progress.show(2);
  }
  std::fflush(terminal);
  // The kernel passes on what was written in pieces.
  std::string text;
  std::array<char, 256> piece;
  while (!text.ends_with('\n')) {
    const ssize_t count = ::read(master, piece.data(), piece.size());
    ASSERT_GT(count, 0);
    text.append(piece.data(), static_cast<size_t>(count));
  }
  std::fclose(terminal);
  ::close(master);
  EXPECT_EQ(text.find("\r\033[Kstep 1/2 50%\r\033[Kstep 2/2 100%"), 0u) << text;
  EXPECT_TRUE(text.ends_with("\n")) << text;
}

TEST(ProgressLine, OnlyRank0Prints) {
  const std::string text = printed([](std::FILE* file) {
    run_world(2, [&](World&) { ProgressLine(1, {.out = file}).show(1); });
  });
  EXPECT_EQ(text, "step 1/1 100%\n");
  EXPECT_EQ(error_of([] { ProgressLine progress(-1); }),
            "[ProgressLine] steps must be 0 or more; got -1");
}

}  // namespace progress_line_test
}  // namespace tessera::testing
