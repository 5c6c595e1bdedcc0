// What `micro_benchmarks` prints, in a few short rounds.

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "launched.h"

namespace tessera {
namespace micro_benchmarks_test {

using nlohmann::json;

const Command kShort = {"--benchmark_repetitions=2", "--benchmark_format=json"};

/// The median of each number, by benchmark.
std::map<std::string, json> medians_of(const Command& command, const Command& more) {
  const auto end = run_program(with(with(command, kShort), more));
  EXPECT_EQ(end.status, 0) << end.err;
  std::map<std::string, json> medians;
  const json report = json::parse(end.out);
  for (const json& run : report.at("benchmarks")) {
    if (run.at("aggregate_name") != "median") continue;
    std::string name = run.at("run_name");
    medians[name.substr(0, name.rfind('/'))] = run;  // without the number of iterations
  }
  return medians;
}

std::map<std::string, json> medians_of(const std::string& filter, const Command& more = {}) {
  return medians_of({MICRO_BENCHMARKS, "--benchmark_filter=" + filter}, more);
}

TEST(MicroBenchmarks, PrintWhatEachOperatorCostsBeyondThePlainOne) {
  const auto medians = medians_of("dispatch/");
  for (const char* name : {"add", "mm", "view", "layer_norm"}) {
    const json& run = medians.at(std::string("dispatch/") + name);
    EXPECT_GT(run.at("plain_us"), 0);
    // Of two rounds the median is the mean.
    EXPECT_NEAR(run.at("beyond_us"),
                run.at("dist_us").get<double>() - run.at("plain_us").get<double>(), 1e-6);
  }
}

TEST(MicroBenchmarks, PrintTheBandwidthOfEachStepAgainstATriad) {
  // Parameter and gradient are read, the parameter is written; both moments are read and written.
  const std::map<std::string, int> bytes = {
      {"cpu_adam/fp32", 28},    {"cpu_adam/bf16", 22},    {"cpu_adam/master", 30},
      {"fused_adamw/fp32", 28}, {"fused_adamw/bf16", 14}, {"fused_adamw/master", 30},
      {"adamw/fp32", 28},       {"adamw/bf16", 14},       {"adamw/master", 30}};
  const auto medians = medians_of("optim/", {"--elements", "5000"});
  EXPECT_EQ(medians.size(), bytes.size());
  for (const auto& [name, wanted] : bytes) {
    const json& run = medians.at("optim/" + name);
    EXPECT_EQ(run.at("bytes_per_element"), wanted) << name;
    EXPECT_GT(run.at("triad_gb_per_s"), 0) << name;
    EXPECT_GT(run.at("step_gb_per_s"), 0) << name;
    EXPECT_NEAR(run.at("ratio_with_write_allocate"), run.at("ratio").get<double>() * 3 / 4, 1e-9);
  }
}

TEST(MicroBenchmarks, PrintTheTimesOfEachNumberOfRanks) {
  const auto medians = medians_of("ranks/");
  for (const char* name : {"ranks/os_g", "ranks/p_g_os"}) {
    for (const char* part :
         {"passes_ms_2", "optimizer_ms_2", "passes_ms_1024", "optimizer_ms_1024"})
      EXPECT_GT(medians.at(name).at(part), 0) << name << " " << part;
  }
}

TEST(MicroBenchmarks, MeasureCollectivesAndCheckpointsOfSeveralRanks) {
  const TemporaryDirectory directory;
  const Command ranks = {TESSERA_CLI, "run", "-n", "2", "--no-prefix", MICRO_BENCHMARKS};
  const auto medians = medians_of(ranks, {"--benchmark_filter=comm/.*/1MiB|ckpt", "--megabytes",
                                          "1", "--directory", directory.path()});
  EXPECT_EQ(medians.size(), 6U);
  for (const char* name : {"all_gather", "reduce_scatter", "all_to_all"})
    EXPECT_GT(medians.at(std::string("comm/") + name + "/1MiB").at("of_c10d"), 0) << name;
  EXPECT_GT(medians.at("comm/memcpy/1MiB").at("memcpy_busbw"), 0);
  for (const char* ratio : {"save_of_disk", "load_of_disk", "async_blocks_of_memcpy"})
    EXPECT_GT(medians.at("ckpt").at(ratio), 0) << ratio;
}

TEST(MicroBenchmarks, RefuseWhatTheyDoNotKnow) {
  for (const Command& wrong :
       {Command{"--rounds", "3"}, {"--elements", "many"}, {"--benchmark_filter=lion"}}) {
    const auto end = run_program(with({MICRO_BENCHMARKS}, wrong));
    EXPECT_NE(end.status, 0) << wrong[0];
    EXPECT_TRUE(contains(end.err, wrong.back().substr(wrong.back().find('=') + 1)) ||
                contains(end.err, wrong[0]))
        << end.err;
  }
}

}  // namespace micro_benchmarks_test
}  // namespace tessera
