// Moments of a step that are made from traces of smaller ones. Predictions with them, beside
// measured peaks, are in cookbook_memory_test.cpp.
#include <gtest/gtest.h>
#include <tessera/planner/traced_moments.h>

#include <fstream>

#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera {
namespace traced_moments_test {

using namespace testing;

TracedStep step_of(int64_t rows, int64_t forward, int64_t backward) {
  return {rows, {{"forward", false, {"a", "b"}, {}, forward}, {"b", true, {"b"}, {"b"}, backward}}};
}

TEST(TracedMoments, LieOnTheLineThroughTwoSteps) {
  const auto moments = traced_moments({step_of(2, 120, 50), step_of(6, 160, 50)}, 16);
  ASSERT_EQ(moments.size(), 2U);
  EXPECT_EQ(moments[0].nbytes, 260);
  EXPECT_EQ(moments[1].nbytes, 50);
  EXPECT_EQ(moments[1].gradients, std::vector<std::string>{"b"});
  // Bytes that shrink do not become negative.
  EXPECT_EQ(traced_moments({step_of(2, 100, 0), step_of(4, 10, 0)}, 100)[0].nbytes, 0);
  EXPECT_EQ(traced_moments({step_of(2, 120, 50)}, 16)[0].nbytes, 8 * 120);
}

TEST(TracedMoments, AreReadAsTheyWereWritten) {
  const ScratchDirectory directory;
  const std::string path = directory / "steps.json";
  write_traced_steps(path, {step_of(2, 120, 50), step_of(6, 160, 50)});
  const auto read = read_traced_steps(path);
  ASSERT_EQ(read.size(), 2U);
  EXPECT_EQ(read[1].rows, 6);
  EXPECT_EQ(read[0].moments[0].parameters, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(read[0].moments[1].backward);
  EXPECT_EQ(traced_moments(read, 16)[0].nbytes, 260);
  for (const std::string text :
       {"", "{}", "[1]", R"([{"rows": 0, "moments": []}])", R"([{"rows": 2}])",
        R"([{"rows": 2, "moments": [{"name": "x", "backward": false, "parameters": [],
            "gradients": [], "nbytes": -1}]}])"}) {
    std::ofstream(path) << text;
    expect_error([&] { read_traced_steps(path); }, {"[read_traced_steps]", path});
  }
}

TEST(TracedMoments, OfDifferentProgramsAreRefused) {
  const auto refused = [](const std::vector<TracedStep>& steps, int64_t rows,
                          const std::string& why) {
    expect_error([&] { traced_moments(steps, rows); }, {"[traced_moments]", why});
  };
  refused({}, 4, "one step or two");
  refused({step_of(1, 1, 1), step_of(2, 1, 1), step_of(3, 1, 1)}, 4, "got 3");
  refused({step_of(2, 1, 1), step_of(2, 1, 1)}, 4, "both have 2");
  refused({step_of(2, 1, 1), step_of(3, 1, 1)}, 0, "got 0");
  TracedStep other = step_of(3, 1, 1);
  other.moments[0].parameters = {"b", "a"};
  refused({step_of(2, 1, 1), other}, 4, "same order");
}

// Of a chain of layers, each parameter is read in forward, and each gradient made, last layer
// first.
TEST(TracedStep, HasAMomentForEachUseAndEachGradient) {
  run_world(1, [](World&) {
    const auto net = std::make_shared<Mlp>(16, 3, 5);
    auto sharded = fully_shard(net, {.unit_bytes = 0});
    torch::optim::SGD sgd(net->parameters(), 0.1);
    ShardedOptimizer optimizer(sharded, sgd);
    const auto train = [&](int64_t rows) {
      optimizer.zero_grad();
      sharded.forward(torch::ones({rows, 16})).sum().backward();
      optimizer.step();
    };
    for (int i = 0; i < 2; ++i) train(8);
    const MemoryTracer tracer(sharded);
    expect_error([&] { traced_step(sharded, tracer, 8); }, {"[traced_step]", "no step"});
    train(8);
    const TracedStep step = traced_step(sharded, tracer, 8);
    std::vector<std::string> read, made;
    for (const ActivationMoment& moment : step.moments) {
      if (!moment.backward)
        read.insert(read.end(), moment.parameters.begin(), moment.parameters.end());
      made.insert(made.end(), moment.gradients.begin(), moment.gradients.end());
      EXPECT_GE(moment.nbytes, 0);
      EXPECT_TRUE(moment.backward || moment.gradients.empty());
    }
    std::set<std::string> all;
    for (const auto& parameter : net->named_parameters()) all.insert(parameter.key());
    EXPECT_EQ(std::set(read.begin(), read.end()), all);
    EXPECT_EQ(std::set(made.begin(), made.end()), all);
    EXPECT_EQ(made.size(), all.size());
    EXPECT_EQ(made.front().substr(0, 4), "head");
    // The plan takes them, and follows them.
    const auto rank = plan_report(parameter_sizes(Mlp(16, 3, 5)), {},
                                  {.ranks = 2, .moments = traced_moments({step}, 64)})
                          .rank;
    EXPECT_GT(rank.peak.other, 0);
    EXPECT_NE(rank.peak_at, "");
    expect_error([&] { traced_step(sharded, tracer, 0); }, {"rows", "got 0"});
  });
}

TEST(TracedStep, NeedsOneRankAndAUnitForEachParameter) {
  run_world(1, [](World&) {
    auto sharded = fully_shard(std::make_shared<Mlp>(16, 3, 5), ShardPlan{});
    const MemoryTracer tracer(sharded);
    expect_error([&] { traced_step(sharded, tracer, 1); }, {"one parameter", "unit_bytes = 0"});
  });
  run_world(2, [](World&) {
    auto sharded = fully_shard(std::make_shared<Mlp>(16, 3, 5), {.unit_bytes = 0});
    const MemoryTracer tracer(sharded);
    expect_error([&] { traced_step(sharded, tracer, 1); }, {"on one rank", "it is on 2"});
  });
}

}  // namespace traced_moments_test
}  // namespace tessera
