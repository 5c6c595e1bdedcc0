// The time of a step, against cases computed by hand.
#include <gtest/gtest.h>
#include <tessera/planner/step_time.h>

#include <atomic>
#include <limits>

#include "comm/group/capability.h"
#include "engine/grad/reducer.h"
#include "support/models.h"
#include "support/paper_net.h"
#include "support/run_world.h"

namespace tessera {
namespace step_time_test {

constexpr double kUnit = 1 << 20;  // bytes of each of four units, which need no padding
constexpr int kUnits = 4;

std::vector<ParameterSize> four_units() {
  return made_up_parameter_sizes(kUnits * static_cast<int64_t>(kUnit) / 4, kUnits, at::kFloat);
}

ShardPlan plan_at(ShardLevel level) { return {.level = level, .unit_bytes = 0}; }

// Two hosts over links without headers, of a unit per second: half of a unit takes half a second.
StepTimeOptions two_hosts() { return {.hosts = 2, .link_bandwidth = kUnit, .payload_share = 1}; }

StepTime time_at(ShardLevel level, const StepTimeOptions& options) {
  return step_time(four_units(), plan_at(level), options);
}

// The agreement after each backward, which other messages share the link with.
double agreement_seconds(const StepTimeOptions& options) {
  return static_cast<double>(Reducer::agreement_nbytes(kUnits)) * options.ranks_per_host / kUnit;
}

// All units are reduced and gathered, one after the other, while nothing is computed. Each takes
// half a second a unit at two hosts.
TEST(StepTime, OfALinkIsThatOfItsBytes) {
  const StepTimeOptions options = two_hosts();
  const double agreement = agreement_seconds(options);
  for (const auto level :
       {ShardLevel::kNone, ShardLevel::kOptimizerState, ShardLevel::kGradients}) {
    const StepTime time = time_at(level, options);
    EXPECT_NEAR(time.seconds, 4 + agreement, 1e-9);
    EXPECT_NEAR(time.link, time.seconds, 1e-9);
    EXPECT_NEAR(time.link_nbytes, kUnits * kUnit + agreement * kUnit, 1e-3);
    EXPECT_EQ(time.compute, 0);
  }
  // With one unit of prefetch, the last two units of forward stay for backward: 6 gathers, and 4
  // reductions.
  const StepTime time = time_at(ShardLevel::kParameters, options);
  EXPECT_NEAR(time.link_nbytes, 5 * kUnit + agreement * kUnit, 1e-3);
  EXPECT_GE(time.seconds, time.link - 1e-9);
}

// Each use takes longer than a transfer (12 s forward, 24 s backward). Only the last reduction and
// the first gather are not hidden.
TEST(StepTime, OfComputationHidesAllButTheFirstAndLastUnit) {
  StepTimeOptions options = two_hosts();
  options.compute_seconds = 36;
  const StepTime time = time_at(ShardLevel::kGradients, options);
  EXPECT_NEAR(time.forward, 12 + 0.5, 1e-9);
  EXPECT_NEAR(time.seconds, 36 + 0.5 + 0.5, 1e-4);  // the agreement is on the link meanwhile
  EXPECT_EQ(time.compute, 36);
  // At kNone, the gradients of each unit are gathered behind their reduction, in buckets in the
  // optimizer's step.
  EXPECT_NEAR(time_at(ShardLevel::kNone, options).seconds, 36 + 0.5 + 0.5, 1e-4);
  ShardPlan in_buckets = plan_at(ShardLevel::kNone);
  in_buckets.bucket_bytes = static_cast<int64_t>(2 * kUnit);
  EXPECT_NEAR(step_time(four_units(), in_buckets, options).seconds, 36 + 2 * 0.5 + 4 * 0.5, 1e-4);
  // The prefetch of the first two units begins after the last reduction, on the other channel.
  options.backward_share = 0.5;
  const StepTime parameters = time_at(ShardLevel::kParameters, options);
  EXPECT_NEAR(parameters.seconds, 36 + 0.5 + 0.5, 1e-4);
}

// Without prefetch, each gather is waited for: 4 in forward, 3 in backward, whose first unit is
// still there.
TEST(StepTime, WithoutPrefetchWaitsForEachGather) {
  StepTimeOptions options = two_hosts();
  options.compute_seconds = 36;
  ShardPlan plan = plan_at(ShardLevel::kParameters);
  plan.prefetch = 0;
  const StepTime time = step_time(four_units(), plan, options);
  // In backward, a gather shares the link with the reduction of the unit before it: both take 1 s.
  EXPECT_NEAR(time.forward, 12 + 4 * 0.5, 1e-9);
  EXPECT_NEAR(time.backward, 24 + 3 * 1.0, 1e-4);
}

// Messages of nothing but latency are in flight at the same time.
TEST(StepTime, OfLatencyIsThatOfTheLastMessageInARow) {
  StepTimeOptions options{.hosts = 2, .link_latency = 0.01};
  for (const int ranks : {1, 2}) {
    options.ranks_per_host = ranks;
    // The gathers; three reductions, after which the rank pauses, as more than two units are in
    // flight; the last one and the agreement.
    EXPECT_NEAR(time_at(ShardLevel::kGradients, options).seconds, 3 * 0.01, 1e-9);
  }
}

TEST(StepTime, OfOneHostHasNoLink) {
  StepTimeOptions options{.ranks_per_host = 4,
                          .link_bandwidth = 1,
                          .link_latency = 1,
                          .compute_seconds = 3,
                          .optimizer_seconds = 8};
  for (const auto level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
    const StepTime time = time_at(level, options);
    EXPECT_NEAR(time.seconds, 3 + 8.0 / 4, 1e-9);
    EXPECT_EQ(time.link_nbytes, 0);
  }
  EXPECT_NEAR(time_at(ShardLevel::kNone, options).seconds, 3 + 8, 1e-9);
  // Each rank reads a unit's bytes, its part of the gradients of four ranks, at two units per
  // second.
  options.host_bandwidth = 2 * kUnit;
  options.compute_seconds = 0;
  EXPECT_NEAR(time_at(ShardLevel::kGradients, options).seconds, 4 * 0.5 + 2, 1e-9);
}

// A unit crosses the link as often as with one rank on each host.
TEST(StepTime, HostsSendAUnitOnceForAllOfTheirRanks) {
  StepTimeOptions options = two_hosts();
  const double one = time_at(ShardLevel::kGradients, options).link_nbytes;
  options.ranks_per_host = 8;
  const double eight = time_at(ShardLevel::kGradients, options).link_nbytes;
  const auto agreement = static_cast<double>(Reducer::agreement_nbytes(kUnits));
  EXPECT_NEAR(eight - one, 7 * agreement, 1e-3);
}

// At kNone a host sends the gradients once to reduce them, and once to gather the sums, whatever
// the number of its ranks: the messages of two hosts of two ranks are counted. (Padding, which
// these units lack, is gathered only.)
TEST(StepTime, CountsTheBytesThatTwoHostsSend) {
  const ShardPlan plan = plan_at(ShardLevel::kNone);
  std::atomic<int64_t> sent{0};
  std::atomic<double> planned{0};
  run_hosts(4, by_halves, [&](World& world) {
    const auto net =
        testing::seeded(3, [] { return std::make_shared<testing::BlockNet>(16, 3, false); });
    if (world.rank() == 0) {
      planned =
          step_time(parameter_sizes(*net), plan, {.hosts = 2, .ranks_per_host = 2}).link_nbytes;
    }
    testing::PaperJob<testing::BlockNet> job(net, plan);
    const auto x = torch::ones({2, 16});
    for (int step = 0; step < 2; ++step) job.step(x);
    const auto* const sender = capability<SendsMessages>(*world.process_group());
    ASSERT_NE(sender, nullptr);
    const int64_t before = sender->sent().nbytes;
    job.step(x);
    sent += sender->sent().nbytes - before;
  });
  EXPECT_EQ(static_cast<double>(sent) / 2, planned);
  const int64_t parameters = 3 * 16 * 16 * 4;
  EXPECT_EQ(sent / 2, parameters + 2 * Reducer::agreement_nbytes(3));
}

// Processor time of messages: alone, a unit takes 1 s; a step's four, 4 s. Beside computation a
// rank gives at most half of its time to them.
TEST(StepTime, TakesProcessorTimeForMessages) {
  StepTimeOptions options{.hosts = 2, .processor_seconds_per_byte = 1 / kUnit};
  EXPECT_NEAR(time_at(ShardLevel::kGradients, options).seconds, 4, 1e-3);
  options.compute_seconds = 30;
  EXPECT_NEAR(time_at(ShardLevel::kGradients, options).seconds, 34, 1e-3);
}

TEST(StepTime, RefusesNumbersThatNoJobHas) {
  const auto refuses = [](StepTimeOptions options) {
    EXPECT_THROW(time_at(ShardLevel::kGradients, options), c10::ValueError);
  };
  refuses({.hosts = 0});
  refuses({.ranks_per_host = 0});
  refuses({.hosts = 1 << 15, .ranks_per_host = 1 << 15});
  refuses({.link_bandwidth = -1});
  refuses({.compute_seconds = std::numeric_limits<double>::infinity()});
  refuses({.payload_share = 0});
  refuses({.backward_share = 1.5});
  ShardPlan plan = plan_at(ShardLevel::kGradients);
  plan.offload = Offload::kHost;
  EXPECT_THROW(step_time(four_units(), plan, {}), c10::NotImplementedError);
}

}  // namespace step_time_test
}  // namespace tessera
