// The numbers that `tessera bench step` prints agree with each other.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "launched.h"

namespace tessera::step_bench_test {

using nlohmann::json;

constexpr double kRounding = 1e-9;  // relative
const Command kParts = {"zero_grad", "forward", "backward", "optimizer"};

ProgramEnd measured(int ranks, const Command& more) {
  const Command command = {TESSERA_CLI,          "bench", "step",    "--size", "tiny",
                           "--rounds",           "1",     "--steps", "1",      "--ranks",
                           std::to_string(ranks)};
  return run_program(with(command, more));
}

json report_of(int ranks, const std::string& level, std::vector<std::string> more = {}) {
  more.insert(more.end(), {"--level", level, "--json"});
  const auto end = measured(ranks, more);
  EXPECT_EQ(end.status, 0) << end.err;
  return json::parse(end.out);
}

void expect_near_relatively(double value, double expected) {
  EXPECT_NEAR(value, expected, kRounding * expected);
}

void expect_ratios_fit(const json& report) {
  const double sharded = report.at("seconds").at("sharded"), local = report["seconds"].at("local");
  EXPECT_GT(local, 0);
  expect_near_relatively(report.at("ratio"), sharded / local);
  expect_near_relatively(report.at("ratio_of_rounds").at(0), sharded / local);
  expect_near_relatively(report.at("ratio_to_limit"),
                         sharded / report.at("limit_seconds").get<double>());
  EXPECT_GT(report.at("ratio_of_minimums"), 0);
  // Nothing is faster than the best.
  EXPECT_GE(report.at("core_noise"), 1);
  EXPECT_EQ(report.at("core_noise_of_rounds").size(), report.at("rounds"));
}

void expect_parts_fit(const json& report, const std::string& role) {
  const auto& parts = report.at("breakdown_ms").at(role);
  EXPECT_EQ(parts.size(), kParts.size());
  double sum = 0;
  for (const auto& part : kParts) {
    EXPECT_GT(parts.at(part), 0) << part;
    sum += parts.at(part).get<double>();
  }
  const double step = 1e3 * report.at("seconds").at(role).get<double>();
  EXPECT_LE(sum, step * (1 + kRounding));
  EXPECT_GE(sum, 0.8 * step) << "a part of the step is not measured";
  expect_near_relatively(1e3 * report.at("optimizer_seconds").at(role).get<double>(),
                         parts.at("optimizer"));
}

TEST(StepBench, ADialectIsMeasuredAgainstFullyShardToo) {
  const auto end = measured(2, {"--level", "os_g", "--dialect", "fairscale", "--json"});
  ASSERT_EQ(end.status, 0) << end.err;
  const auto report = json::parse(end.out);
  const double sharded = report.at("seconds").at("sharded"), native = report.at("native_seconds");
  EXPECT_GT(native, 0);
  expect_near_relatively(report.at("ratio_to_native"), sharded / native);
  expect_near_relatively(report.at("ratio_to_native_of_rounds").at(0), sharded / native);
  EXPECT_GT(report.at("ratio_to_native_of_minimums"), 0);
  EXPECT_FALSE(report_of(1, "os").contains("native_seconds"));
}

// The median of the two ranks' one step each is their mean: relations that hold for each step hold
// for the medians, too.
TEST(StepBench, PrintsTimesThatFitEachOther) {
  for (const std::string level : {"os_g", "p_g_os"}) {
    const auto report = report_of(2, level);
    expect_ratios_fit(report);
    for (const std::string role : {"sharded", "local"}) {
      SCOPED_TRACE(level + ", " + role);
      expect_parts_fit(report, role);
    }
    const double local = report["seconds"]["local"], limit = report["limit_seconds"];
    EXPECT_LT(limit, local);
    expect_near_relatively(limit, local - report["optimizer_seconds"]["local"].get<double>() / 2);
  }
}

TEST(StepBench, MeasuresLocalProcessesInStepIfAsked) {
  const auto end = measured(2, {"--level", "os", "--in-step", "--json"});
  ASSERT_EQ(end.status, 0) << end.err;
  const auto report = json::parse(end.out);
  const double sharded = report.at("seconds").at("sharded");
  const double in_step = report.at("in_step_seconds"), limit = report.at("in_step_limit_seconds");
  EXPECT_GT(limit, 0);
  EXPECT_LT(limit, in_step);
  expect_near_relatively(report.at("ratio_to_in_step"), sharded / in_step);
  expect_near_relatively(report.at("ratio_to_in_step_limit"), sharded / limit);
  EXPECT_FALSE(report_of(1, "os").contains("in_step_seconds"));
}

// The momentum of matrices is a tensor, where AdamW has two, and each rank has that of its own.
TEST(StepBench, MeasuresMuonOnWholeMatrices) {
  const auto report = report_of(2, "os_g", {"--optimizer", "muon"}), adamw = report_of(2, "os_g");
  EXPECT_EQ(report.at("optimizer"), "muon");
  expect_parts_fit(report, "sharded");
  const auto state = [](const json& of, const char* role) {
    return of.at("kept_bytes").at(role).at("optimizer_state").get<double>();
  };
  EXPECT_LT(state(report, "local"), 0.65 * state(adamw, "local"));
  EXPECT_LT(state(report, "sharded"), 0.65 * state(report, "local"));
}

TEST(StepBench, MuonOfOneRankIsMuonOfOneProcess) {
  const auto alone = report_of(1, "os", {"--optimizer", "muon"}).at("final_loss");
  EXPECT_EQ(alone.at("sharded"), alone.at("local"));
  EXPECT_NE(alone, report_of(1, "os").at("final_loss"));
}

TEST(StepBench, MuonOverMessagesHasTheLossItHasInMemory) {
  const auto loss = [](const std::string& transport) {
    return report_of(2, "os_g", {"--optimizer", "muon", "--transport", transport}).at("final_loss");
  };
  EXPECT_EQ(loss("gloo"), loss("arena"));
}

TEST(StepBench, RefusesMuonInADialect) {
  const auto end = measured(1, {"--level", "os", "--dialect", "fairscale", "--optimizer", "muon"});
  EXPECT_NE(end.status, 0);
  EXPECT_TRUE(contains(end.err, "--optimizer muon goes with --dialect native")) << end.err;
}

// Waiting for less noise than none would never end.
TEST(StepBench, WaitsForQuietThatCanCome) {
  const auto end = measured(1, {"--level", "os", "--quiet", "1"});
  EXPECT_NE(end.status, 0);
  EXPECT_TRUE(contains(end.err, "--quiet must be 0, or above 1")) << end.err;
  EXPECT_EQ(report_of(1, "os", {"--quiet", "9"}).at("quiet"), 9);
}

TEST(StepBench, OneRankHasTheLocalReferenceAsItsLimit) {
  const auto report = report_of(1, "p_g_os");
  EXPECT_EQ(report.at("limit_seconds"), report.at("seconds").at("local"));
  EXPECT_EQ(report.at("ratio_to_limit"), report.at("ratio"));
  EXPECT_EQ(report.at("ratio_of_minimums"), report.at("ratio"));
  EXPECT_EQ(report.at("bytes_sent_per_step"), 0);
}

TEST(StepBench, PrintsATableWithTheLimitAndTheParts) {
  const auto end = measured(2, {"--level", "os_g"});
  EXPECT_EQ(end.status, 0) << end.err;
  for (const std::string row :
       {"seconds per step (median)", "local with 1/2 of its optimizer", "of the fastest steps",
        "page faults per step", "cores by themselves"}) {
    EXPECT_TRUE(contains(end.out, row)) << end.out;
  }
  for (const auto& part : kParts) {
    EXPECT_TRUE(contains(end.out, "  " + part + " (ms)")) << end.out;
  }
}

}  // namespace tessera::step_bench_test
