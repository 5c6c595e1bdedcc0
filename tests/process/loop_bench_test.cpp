// The numbers that `tessera bench loop` prints agree with each other.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "benchmarks/median.h"
#include "launched.h"

namespace tessera::loop_bench_test {

using nlohmann::json;

ProgramEnd measured(const Command& more, int steps = 1) {
  const Command command = {TESSERA_CLI,          "bench", "loop",    "--size", "tiny",
                           "--rounds",           "1",     "--ranks", "2",      "--steps",
                           std::to_string(steps)};
  return run_program(with(command, more));
}

TEST(LoopBench, MeasuresEachLoopAgainstThreeOthers) {
  const auto end =
      measured({"--loop", "none", "--loop", "clip,accumulate,checkpoint,dropout", "--json"});
  ASSERT_EQ(end.status, 0) << end.err;
  const json report = json::parse(end.out);
  std::vector<std::string> loops;
  for (const json& result : report.at("loops")) {
    loops.push_back(result.at("loop"));
    const double sharded = result.at("seconds").at("sharded");
    for (const char* other : {"local", "in_step", "threads"}) {
      const json& ratio = result.at("ratio_to").at(other);
      const double expected = sharded / result["seconds"].at(other).get<double>();
      EXPECT_NEAR(ratio.at("median"), expected, 1e-9 * expected) << other;
      EXPECT_EQ(ratio.at("low"), ratio.at("high"));  // one round
    }
    double sum = 0;
    for (const auto& [part, ms] : result.at("parts_ms").at("sharded").items())
      sum += ms.get<double>();
    EXPECT_NEAR(sum, 1e3 * sharded, 0.2 * 1e3 * sharded) << "a part of the step is not measured";
    const bool clips = loops.back() == "clip,accumulate,checkpoint,dropout";
    EXPECT_EQ(result["parts_ms"]["sharded"]["clip"].get<double>() > 0.01, clips);
  }
  EXPECT_EQ(loops, (std::vector<std::string>{"none", "clip,accumulate,checkpoint,dropout"}));
}

// Three steps warm up: the seventh of these ten is the tenth of all.
TEST(LoopBench, CountsTheEvaluationOfTheTenthStep) {
  const auto end = measured({"--loop", "evaluate", "--json"}, /*steps=*/10);
  ASSERT_EQ(end.status, 0) << end.err;
  const json result = json::parse(end.out).at("loops").at(0);
  for (const char* role : {"sharded", "local", "in_step", "threads"})
    EXPECT_GT(result.at("parts_ms").at(role).at("evaluation"), 0.05) << role;
}

// Of 5 and 20 tosses at most 0 and 5 are heads with a probability of 3.1 % and 2.07 %, at most 6 of
// 20 with 5.8 %; at most 1 of 8 with 3.5 %.
TEST(MedianInterval, LeavesAwayWhatCoinsWouldOnEachSide) {
  for (const auto& [count, low] : {std::pair{1, 1}, {5, 1}, {8, 1}, {9, 2}, {20, 6}}) {
    std::vector<double> values;
    for (int i = count; i > 0; --i) values.push_back(i);
    const auto interval = tools::median_interval(values);
    EXPECT_EQ(interval.low, low) << count;
    EXPECT_EQ(interval.high, count + 1 - low) << count;
  }
}

TEST(LoopBench, RefusesOptionsOfALaterLoopBeforeItMeasures) {
  const auto end =
      measured({"--dialect", "fairscale", "--level", "os", "--loop", "none", "--loop", "clip"});
  EXPECT_NE(end.status, 0);
  EXPECT_TRUE(contains(end.err, "loops go with --dialect native; got 'fairscale'")) << end.err;
  EXPECT_FALSE(contains(end.err, "round 1")) << end.err;
}

TEST(LoopBench, PrintsATable) {
  const auto end = measured({"--loop", "schedule"});
  ASSERT_EQ(end.status, 0) << end.err;
  for (const char* text : {"schedule", "to local in step", "to as many threads"})
    EXPECT_TRUE(contains(end.out, text)) << end.out;
}

TEST(LoopBench, NamesTheSwitchesItHas) {
  const auto end = measured({"--loop", "clip,nothing"});
  EXPECT_NE(end.status, 0);
  EXPECT_TRUE(contains(end.err, "clip, schedule, accumulate, evaluate, bf16, checkpoint, dropout"))
      << end.err;
  EXPECT_TRUE(contains(end.err, "'nothing'")) << end.err;
}

}  // namespace tessera::loop_bench_test
