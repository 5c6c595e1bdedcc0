// Processes that share memory: their start, the death of one, and their leftovers.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "own_shared_memory.h"
#include "started_ranks.h"

namespace tessera::arena_test {

using std::chrono::seconds;
using std::chrono::steady_clock;

std::string after(const std::string& text, const std::string& mark) {
  const size_t at = text.find(mark);
  if (at == std::string::npos) return "";
  const size_t begin = at + mark.size();
  return text.substr(begin, text.find('\n', begin) - begin);
}

std::set<std::string> files_in(const char* directory) {
  std::set<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(directory, none))
    names.insert(entry.path().filename());
  return names;
}

std::string mounts() {
  std::ifstream file("/proc/self/mounts");
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(ArenaProcesses, GiveTheBitsOfGloo) {
  std::vector<std::string> sums;
  using Settings = std::map<std::string, std::string>;
  for (const Settings& settings : {Settings{{"TESSERA_TRANSPORT", "gloo"}}, Settings{},
                                   Settings{{"TESSERA_TRANSPORT", "arena"}},
                                   Settings{{"TESSERA_PAGE_HEAP", "0"}},  // gradients are copied
                                   Settings{{"TESSERA_HUGE_PAGES", "0"}}}) {
    const auto ends = StartedRanks(3, {ARENA_PROBE, "4"}, settings).wait();
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(ends[rank].status, 0) << ends[rank].err;
      EXPECT_EQ(after(ends[rank].out, " over "), sums.size() < 3 ? "gloo" : "arena");
      sums.push_back(after(ends[rank].out, " sum "));
      EXPECT_FALSE(contains(ends[rank].err, "Warning")) << ends[rank].err;
    }
  }
  EXPECT_FALSE(sums[0].empty());
  EXPECT_EQ(std::set<std::string>(sums.begin(), sums.end()).size(), 1U);
}

// The other ranks do the late rank's part of the sums, in its memory.
TEST(ArenaProcesses, GiveTheBitsOfGlooWhereARankIsLate) {
  std::vector<std::string> sums;
  for (const char* transport : {"gloo", "arena"}) {
    for (const char* late : {"0", "2"}) {
      const auto ends =
          StartedRanks(3, {ARENA_PROBE, "10", "late", late}, {{"TESSERA_TRANSPORT", transport}})
              .wait();
      for (const auto& end : ends) {
        EXPECT_EQ(end.status, 0) << end.err;
        sums.push_back(after(end.out, " sum "));
      }
    }
  }
  EXPECT_FALSE(sums[0].empty());
  EXPECT_EQ(std::set<std::string>(sums.begin(), sums.end()).size(), 1U);
}

// Messages in the shared heap and, without it, copies.
TEST(ArenaProcesses, SendEachOtherMessages) {
  using Settings = std::map<std::string, std::string>;
  for (const Settings& settings : {Settings{}, Settings{{"TESSERA_PAGE_HEAP", "0"}}}) {
    for (const auto& end : StartedRanks(3, {ARENA_PROBE, "1", "exchange"}, settings).wait()) {
      EXPECT_EQ(end.status, 0) << end.err;
      EXPECT_EQ(after(end.out, " over "), "arena");
      EXPECT_TRUE(contains(end.out, " exchanged\n")) << end.out;
    }
  }
}

TEST(ArenaProcesses, NoticeWithinSecondsThatARankHasDied) {
  StartedRanks job(3, {ARENA_PROBE, "1000000", "die", "1", "5"});
  ASSERT_TRUE(job.rank(0).wait_for_output("step 4\n"));
  const auto start = steady_clock::now();
  const auto ends = job.wait();
  EXPECT_LT(steady_clock::now() - start, seconds(5));
  EXPECT_EQ(ends[1].status, 128 + SIGKILL);
  for (const int rank : {0, 2}) {
    EXPECT_EQ(ends[rank].status, 1);
    EXPECT_TRUE(contains(ends[rank].err, "for rank 1 and failed")) << ends[rank].err;
    EXPECT_TRUE(contains(ends[rank].err, "has ended")) << ends[rank].err;
  }
}

TEST(ArenaProcesses, LeaveNothingBehindWhenAllAreKilled) {
  if (!take_own_shared_memory()) GTEST_SKIP() << "this process may not mount anything";
  const auto files = files_in("/dev/shm");
  const std::string mounted = mounts();
  StartedRanks job(2, {ARENA_PROBE, "3", "stay"});
  for (const int rank : {0, 1}) ASSERT_TRUE(job.rank(rank).wait_for_output("stays\n"));
  EXPECT_EQ(files_in("/dev/shm"), files);
  EXPECT_EQ(mounts(), mounted);
  for (const int rank : {0, 1}) job.rank(rank).signal(SIGKILL);
  for (const auto& end : job.wait()) EXPECT_EQ(end.status, 128 + SIGKILL);
  EXPECT_EQ(files_in("/dev/shm"), files);
  EXPECT_EQ(mounts(), mounted);
}

TEST(ArenaProcesses, FallBackToGlooWithOneWarningThatSaysWhy) {
  const Command limited = {"/bin/sh", "-c", "ulimit -f 2000; exec \"$@\"", "sh"};
  const auto ends = StartedRanks(2, {ARENA_PROBE, "3"}, {}, limited).wait();
  for (const int rank : {0, 1}) {
    EXPECT_EQ(ends[rank].status, 0) << ends[rank].err;
    EXPECT_EQ(after(ends[rank].out, " over "), "gloo");
  }
  EXPECT_TRUE(contains(ends[0].err, "ulimit -f")) << ends[0].err;
  EXPECT_TRUE(contains(ends[0].err, "TESSERA_TRANSPORT=gloo")) << ends[0].err;
  EXPECT_FALSE(contains(ends[1].err, "ulimit -f")) << ends[1].err;
}

TEST(ArenaProcesses, RefuseOnAllRanksWhereTheArenaIsForcedAndCanNotBe) {
  const Command limited = {"/bin/sh", "-c", "ulimit -f 2000; exec \"$@\"", "sh"};
  for (const auto& end :
       StartedRanks(2, {ARENA_PROBE, "3"}, {{"TESSERA_TRANSPORT", "arena"}}, limited).wait()) {
    EXPECT_EQ(end.status, 1);
    EXPECT_TRUE(contains(end.err, "can't share memory: rank 0")) << end.err;
  }
  const auto unknown =
      StartedRanks(2, {ARENA_PROBE, "3"}, {{"TESSERA_TRANSPORT", "pigeon"}}).wait();
  EXPECT_TRUE(contains(unknown[1].err, "got 'pigeon'")) << unknown[1].err;
}

}  // namespace tessera::arena_test
