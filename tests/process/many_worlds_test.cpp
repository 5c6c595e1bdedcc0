// Worlds one after another in one process, jobs one after another, and worlds of many ranks.

#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>
#include <string>

#include "launched.h"
#include "own_shared_memory.h"

namespace tessera::many_worlds_test {

namespace fs = std::filesystem;

ProgramEnd run_probe(int ranks, const Command& arguments, const std::string& transport,
                     std::map<std::string, std::string> environment = {}) {
  environment["TESSERA_TRANSPORT"] = transport;
  environment["TESSERA_TIMEOUT"] = "60";
  environment["OMP_NUM_THREADS"] = "1";
  return run_program(
      with({TESSERA_CLI, "run", "-n", std::to_string(ranks), WORLD_PROBE}, arguments),
      {.environment = environment, .limit = std::chrono::seconds(1500)});
}

void expect_one_after_another(const std::string& transport, int count) {
  const auto end = run_probe(2, {"--remake", std::to_string(count)}, transport);
  EXPECT_EQ(end.status, 0) << end.err;
  for (const std::string rank : {"[0] ", "[1] "}) {
    const auto counts = [&](int world) {
      const std::string key = rank + "world " + std::to_string(world) + " ";
      const size_t at = end.out.find(key);
      return at == std::string::npos ? "none" : end.out.substr(at + key.size(), 30);
    };
    const std::string tenth = counts(10), last = counts(count);
    EXPECT_EQ(tenth.substr(0, tenth.find('\n')), last.substr(0, last.find('\n'))) << end.out;
    EXPECT_TRUE(tenth.starts_with("descriptors ")) << end.out;
  }
}

class ManyWorlds : public ::testing::TestWithParam<std::string> {};
class ManyWorldsNightly : public ::testing::TestWithParam<std::string> {};

TEST_P(ManyWorlds, OneAfterAnotherInAProcessLeaveNothing) {
  expect_one_after_another(GetParam(), 12);
}
TEST_P(ManyWorldsNightly, FiveHundredInAProcessLeaveNothing) {
  expect_one_after_another(GetParam(), 500);
}

TEST_P(ManyWorldsNightly, HaveUpTo32Ranks) {
  for (const int ranks : {8, 16, 32}) {
    const auto end = run_probe(ranks, {}, GetParam());
    EXPECT_EQ(end.status, 0) << end.err;
    const std::string sum = "sum " + std::to_string(ranks * (ranks + 1) / 2);
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_TRUE(contains(end.out, "rank " + std::to_string(rank) + " of ")) << rank;
    EXPECT_TRUE(contains(end.out, sum)) << end.out;
  }
}

TEST_P(ManyWorldsNightly, AThousandJobsLeaveNoFiles) {
  if (!take_own_shared_memory()) GTEST_SKIP() << "this process may not mount anything";
  const TemporaryDirectory directory;
  const auto files = [](const std::string& folder) {
    return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
  };
  const auto before = files("/dev/shm");
  for (int job = 0; job < 1000; ++job) {
    const auto end = run_probe(
        2, {}, GetParam(), {{"TMPDIR", directory.path()}, {"XDG_STATE_HOME", directory.path()}});
    ASSERT_EQ(end.status, 0) << "job " << job << ": " << end.err;
    ASSERT_TRUE(contains(end.out, "sum 3")) << end.out;
  }
  EXPECT_EQ(files("/dev/shm"), before);
  EXPECT_EQ(files(directory.path()), 1) << "that of flight records, and it is empty";
  EXPECT_EQ(files(directory.path("tessera/flight")), 0);
}

const auto kTransports = ::testing::Values("arena", "gloo");
std::string name_of(const ::testing::TestParamInfo<std::string>& info) { return info.param; }
INSTANTIATE_TEST_SUITE_P(Over, ManyWorlds, kTransports, name_of);
INSTANTIATE_TEST_SUITE_P(Over, ManyWorldsNightly, kTransports, name_of);

}  // namespace tessera::many_worlds_test
