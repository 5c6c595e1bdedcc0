// The output of `tessera bench optim`.

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "launched.h"

namespace tessera {
namespace optim_bench_test {

using nlohmann::json;

json report_of(const Command& arguments) {
  const Command command = {TESSERA_CLI, "bench",    "optim", "--elements",
                           "5000",      "--rounds", "3",     "--json"};
  const auto end = run_program(with(command, arguments));
  EXPECT_EQ(end.status, 0) << end.err;
  return json::parse(end.out);
}

TEST(OptimBench, PrintsTheBandwidthOfEachStepAgainstATriad) {
  // Parameter and gradient are read, the parameter is written; both moments are read and written.
  const std::map<std::string, std::map<std::string, int>> bytes = {
      {"cpu_adam", {{"fp32", 28}, {"bf16", 22}, {"master", 30}}},
      {"fused_adamw", {{"fp32", 28}, {"bf16", 14}, {"master", 30}}},
      {"adamw", {{"fp32", 28}, {"bf16", 14}, {"master", 30}}}};
  for (const auto& [optimizer, wanted] : bytes) {
    const json report = report_of({"--optimizer", optimizer, "--threads", "1"});
    EXPECT_EQ(report.at("optimizer"), optimizer);
    EXPECT_EQ(report.at("elements"), 5000);
    EXPECT_EQ(report.at("threads"), 1);
    EXPECT_EQ(report.at("rounds"), 3);
    std::map<std::string, int> got;
    for (const json& result : report.at("cases")) {
      got[result.at("dtype")] = result.at("bytes_per_element");
      for (const char* what : {"triad_gb_per_s", "step_gb_per_s"}) {
        EXPECT_GT(result.at(what).at("median"), 0);
        EXPECT_GE(result.at(what).at("best"), result.at(what).at("median"));
      }
      EXPECT_GT(result.at("ratio_of_bests"), 0);
      EXPECT_DOUBLE_EQ(result.at("ratio_with_write_allocate"),
                       result.at("ratio").get<double>() * 3 / 4);
    }
    EXPECT_EQ(got, wanted) << optimizer;
  }
}

TEST(OptimBench, MeasuresOneDtypeWhereItIsTold) {
  const json report = report_of({"--dtype", "bf16"});
  ASSERT_EQ(report.at("cases").size(), 1u);
  EXPECT_EQ(report.at("cases")[0].at("dtype"), "bf16");
}

TEST(OptimBench, RefusesWhatItDoesNotKnow) {
  for (const auto& [option, value, part] :
       std::vector<std::array<std::string, 3>>{{"--rounds", "0", "must be at least 1"},
                                               {"--elements", "0", "must be at least 1"},
                                               {"--threads", "-1", "must not be negative"},
                                               {"--dtype", "fp8", "fp8"},
                                               {"--optimizer", "lion", "lion"}}) {
    const auto end = run_program({TESSERA_CLI, "bench", "optim", option, value});
    EXPECT_NE(end.status, 0) << option;
    EXPECT_NE(end.err.find(part), std::string::npos) << end.err;
  }
}

}  // namespace optim_bench_test
}  // namespace tessera
