// `tessera bench scale` prints values for each size, and exponents that follow from them.

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "launched.h"

namespace tessera::scale_bench_test {

using nlohmann::json;

TEST(ScaleBench, ExponentsFollowFromTheValues) {
  const TemporaryDirectory directory;
  const auto end = run_program({TESSERA_CLI, "bench", "scale", "--tensors", "10,40", "--elements",
                                "1000,4000", "--threads", "2,3", "--ranks", "2,32", "--rounds", "1",
                                "--json", "--directory", directory.path()});
  ASSERT_EQ(end.status, 0) << end.err;
  const json report = json::parse(end.out);
  std::vector<std::string> axes;
  for (const json& axis : report) {
    axes.push_back(axis.at("axis"));
    for (const char* name : {"wrap s", "optimizer s", "first step s", "step s", "describe s"})
      for (const double seconds : axis.at("quantities").at(name).at("values"))
        EXPECT_GT(seconds, 0) << axes.back() << " " << name;
  }
  EXPECT_EQ(axes, (std::vector<std::string>{"tensors", "elements", "threads", "ranks"}));
  EXPECT_EQ(report[0]["quantities"]["save s"]["values"].size(), 2U);
  EXPECT_EQ(report[0]["quantities"]["load s"]["values"].size(), 2U);
  // Each rank tells each other the same facts.
  const json& bytes = report[3]["quantities"]["agreement bytes"];
  const double few = bytes["values"][0], many = bytes["values"][1];
  EXPECT_EQ(many / few, 31);
  EXPECT_NEAR(bytes["exponent"].get<double>(), std::log(31) / std::log(16), 1e-9);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

}  // namespace tessera::scale_bench_test
