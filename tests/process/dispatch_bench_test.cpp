// The output of `tessera bench dispatch`.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "launched.h"

namespace tessera {
namespace dispatch_bench_test {

using nlohmann::json;

TEST(DispatchBench, PrintsWhatEachOperatorCostsBeyondThePlainOne) {
  const auto end =
      run_program({TESSERA_CLI, "bench", "dispatch", "--rounds", "3", "--calls", "20", "--json"});
  ASSERT_EQ(end.status, 0) << end.err;
  const json report = json::parse(end.out);
  std::set<std::string> names;
  for (const json& result : report.at("operators")) {
    names.insert(result.at("operator"));
    const double plain = result.at("plain_us"), dist = result.at("dist_us");
    EXPECT_GT(plain, 0);
    EXPECT_DOUBLE_EQ(result.at("beyond_us"), dist - plain);
  }
  for (const char* name : {"add", "mm", "view", "layer_norm"})
    EXPECT_TRUE(names.contains(name)) << name;
}

TEST(DispatchBench, RefusesNoRounds) {
  const auto end = run_program({TESSERA_CLI, "bench", "dispatch", "--rounds", "0"});
  EXPECT_NE(end.status, 0);
  EXPECT_NE(end.err.find("must be at least 1"), std::string::npos) << end.err;
}

}  // namespace dispatch_bench_test
}  // namespace tessera
