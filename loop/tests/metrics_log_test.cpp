// Files of metrics: a table of comma-separated values, and TensorBoard's events.
#include <gtest/gtest.h>
#include <tessera/loop/metrics_log.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <limits>

#include "loop/event_file.h"
#include "support/error_of.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera::testing {
namespace metrics_log_test {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The lines of a table without the column of times.
std::string table(const fs::path& directory) {
  std::ifstream file(directory / "metrics.csv");
  std::string text;
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(','), second = line.find(',', first + 1);
    text += line.substr(0, first) + (second == std::string::npos ? "" : line.substr(second)) + "\n";
  }
  return text;
}

// The events in a file whose frames are checked.
std::vector<std::string> events(const fs::path& path) {
  std::string text = read(path);
  std::vector<std::string> result;
  const auto number = [](const std::string& bytes) {
    uint32_t value = 0;
    std::memcpy(&value, bytes.data(), 4);
    return value;
  };
  const auto masked = [](uint32_t crc) { return std::rotr(crc, 15) + 0xa282ead8U; };
  while (!text.empty()) {
    uint64_t length = 0;
    std::memcpy(&length, text.data(), 8);
    EXPECT_EQ(number(text.substr(8)), masked(crc32c(text.substr(0, 8))));
    result.push_back(text.substr(12, length));
    EXPECT_EQ(number(text.substr(12 + length)), masked(crc32c(result.back())));
    text.erase(0, 16 + length);
  }
  return result;
}

std::vector<fs::path> event_files(const fs::path& directory) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(directory))
    if (entry.path().filename().string().starts_with("events.out.tfevents."))
      found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

TEST(MetricsLog, TableGetsColumnsAsNamesCome) {
  const ScratchDirectory scratch;
  MetricsLog log(scratch / "run");
  log.write(1, {{"loss", 2.5}});
  log.write(2, {{"loss", std::numeric_limits<double>::quiet_NaN()}, {"a, \"b\"", 0.1}});
  log.write(3, {{"a, \"b\"", 1e-9}});
  EXPECT_EQ(table(scratch / "run"), "step,loss,\"a, \"\"b\"\"\"\n1,2.5,\n2,nan,0.1\n3,,1e-09\n");
}

TEST(MetricsLog, ResumedRunReplacesTheStepsThatItRepeats) {
  const ScratchDirectory scratch;
  MetricsLog(scratch.path()).write(1, {{"a,b", 1}});
  for (const int step : {2, 3, 4}) MetricsLog(scratch.path()).write(step, {{"a,b", step}});
  MetricsLog log(scratch.path(), {.first_step = 3});
  log.write(3, {{"a,b", 30}, {"lr", 5}});
  EXPECT_EQ(table(scratch.path()), "step,\"a,b\",lr\n1,1,\n2,2,\n3,30,5\n");
}

TEST(MetricsLog, EventsAreThoseOfTensorBoard) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);  // the check value of CRC-32C
  const ScratchDirectory scratch;
  MetricsLog log(scratch.path(), {.csv = false, .first_step = 300});
  log.write(300, {{"loss", 2.5}});
  ASSERT_EQ(event_files(scratch.path()).size(), 1u);
  const auto found = events(event_files(scratch.path())[0]);
  ASSERT_EQ(found.size(), 3u);
  // Behind the time (9 bytes): the version; the step and the start of a session; the step and a
  // summary with one value, whose float is 2.5.
  EXPECT_EQ(found[0].substr(9),
            "\x1a\x0d"
            "brain.Event:2");
  EXPECT_EQ(found[1].substr(9), "\x10\xac\x02\x3a\x02\x08\x01");
  EXPECT_EQ(found[2].substr(9),
            std::string("\x10\xac\x02\x2a\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\x20\x40", 18));
}

TEST(MetricsLog, OnlyRank0Writes) {
  const ScratchDirectory scratch;
  run_world(2, [&](World& world) {
    MetricsLog log(scratch / std::to_string(world.rank()));
    log.write(1, {{"loss", 1}});
  });
  EXPECT_EQ(event_files(scratch / "0").size(), 1u);
  EXPECT_FALSE(fs::exists(scratch / "1"));
}

TEST(MetricsLog, WrongInputIsRefused) {
  const ScratchDirectory scratch;
  std::ofstream(scratch / "metrics.csv") << "epoch,loss\n1,2\n";
  EXPECT_NE(error_of([&] { MetricsLog log(scratch.path()); }).find("begins with step,wall_time"),
            std::string::npos);
  EXPECT_EQ(read(scratch / "metrics.csv"), "epoch,loss\n1,2\n");
  std::ofstream(scratch / "file") << "x";
  EXPECT_NE(
      error_of([&] { MetricsLog log(scratch / "file"); }).find("could not make the directory"),
      std::string::npos);
  EXPECT_NE(error_of([&] {
              MetricsLog log(scratch / "a", {.csv = false, .tensorboard = false});
            }).find("must be true"),
            std::string::npos);
  MetricsLog log(scratch / "run");
  EXPECT_NE(error_of([&] { log.write(-1, {}); }).find("got -1"), std::string::npos);
  EXPECT_NE(error_of([&] { log.write(1, {{"", 1}}); }).find("one line"), std::string::npos);
}

}  // namespace metrics_log_test
}  // namespace tessera::testing
