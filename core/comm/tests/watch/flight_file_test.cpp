#include "comm/watch/flight_file.h"

#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "support/scratch_directory.h"

namespace tessera::flight_file_test {

// Waits of several threads fail at once where a rank is lost.
TEST(FlightFile, IsWholeWhenSeveralThreadsWriteIt) {
  const testing::ScratchDirectory scratch;
  std::atomic<int> failures = 0;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 8; ++thread) {
      threads.emplace_back([&, thread] {
        const std::string reason(1000 * (thread + 1), 'x');
        for (int i = 0; i < 50; ++i) {
          try {
            write_flight_file(scratch.path(), {.rank = 3, .size = 4, .reason = reason});
          } catch (const std::exception&) {
            ++failures;
          }
        }
      });
    }
  }
  EXPECT_EQ(failures, 0);
  std::ifstream file(scratch / "rank_3.json");
  const auto json = nlohmann::json::parse(file);
  EXPECT_EQ(json.at("rank"), 3);
  EXPECT_EQ(json.at("reason").get<std::string>().size() % 1000, 0U);
}

}  // namespace tessera::flight_file_test
