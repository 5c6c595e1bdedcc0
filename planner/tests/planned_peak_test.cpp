// The moment of a step at which a rank needs the most memory, on models that can be added up by
// hand.
#include <gtest/gtest.h>
#include <tessera/planner/plan_report.h>
#include <tessera/planner/transformer_config.h>

#include <algorithm>

#include "planner/tests/described_configs.h"
#include "support/models.h"

namespace tessera {
namespace planned_peak_test {

using namespace testing;

// Units of 4, 8 and 40 kB in float32.
const std::vector<ParameterSize> kLayers = {{{"a"}, {1000}}, {{"b"}, {2000}}, {{"c"}, {10'000}}};
constexpr int64_t kBytes = 52'000;

PlannedRank planned(ShardLevel level, const std::vector<ActivationMoment>& moments, int ranks = 1,
                    const std::vector<ParameterSize>& sizes = kLayers) {
  return plan_report(sizes, {.level = level, .unit_bytes = 0},
                     {.ranks = ranks, .state_tensors = 1, .moments = moments})
      .rank;
}

std::vector<ActivationMoment> moments_of(int64_t turn) {
  return {{"forward", false, {"a", "b", "c"}, {}, turn / 2},
          {"turn", true, {"c"}, {}, turn},
          {"c", true, {}, {"c"}, turn / 2},
          {"b", true, {"b"}, {"b"}, turn / 4},
          {"a", true, {"a"}, {"a"}, 0}};
}

TEST(PlannedPeak, IsTheSumOfAllPeaksWithoutMoments) {
  const PlanReportOptions options{.state_tensors = 1, .activations = 777};
  const auto rank = plan_report(kLayers, {.unit_bytes = 0}, options).rank;
  // Parameters, gradients, state, one unit's whole gradients, activations; sizes are padded.
  EXPECT_NEAR(rank.needed(), 3 * kBytes + 40'000 + 777, 200);
  EXPECT_EQ(rank.peak.other, 777);
  EXPECT_EQ(rank.peak_at, "");
}

TEST(PlannedPeak, FollowsGradientsAndActivations) {
  const auto at_turn = planned(ShardLevel::kGradients, moments_of(1'000'000));
  EXPECT_EQ(at_turn.peak_at, "turn");
  EXPECT_NEAR(at_turn.needed(), 2 * kBytes + 1'000'000, 200);
  // Few activations: when c's gradient is reduced, whole and reduced ones exist at once.
  const auto later = planned(ShardLevel::kGradients, moments_of(0));
  EXPECT_EQ(later.peak_at, "c");
  EXPECT_NEAR(later.needed(), 2 * kBytes + 40'000 + 40'000, 200);
}

TEST(PlannedPeak, GathersWhatTheMomentsRead) {
  const auto rank = planned(ShardLevel::kParameters, moments_of(1'000'000), 2);
  EXPECT_EQ(rank.peak_at, "turn");
  // c, and b and a, which are prefetched.
  EXPECT_NEAR(rank.peak.gathered, kBytes, 300);
  EXPECT_NEAR(rank.peak.parameters, kBytes / 2, 200);
}

// Units of a bucket wait for each other, whole.
TEST(PlannedPeak, KeepsWholeGradientsThatWaitForOthers) {
  const std::vector<ActivationMoment> moments = {{"forward", false, {"c", "b", "a"}},
                                                 {"c", true, {"c"}, {"c"}},
                                                 {"b", true, {"b"}, {"b"}, 100'000},
                                                 {"a", true, {"a"}, {"a"}}};
  const auto rank =
      plan_report(kLayers,
                  {.level = ShardLevel::kGradients, .unit_bytes = 0, .bucket_bytes = 1 << 20},
                  {.ranks = 4, .state_tensors = 1, .moments = moments})
          .rank;
  EXPECT_EQ(rank.peak_at, "b");
  EXPECT_NEAR(rank.peak.gradients_in_flight, 48'000, 200);
  EXPECT_EQ(rank.peak.gradients, 0);
}

// A tied parameter is used first in backward, and its gradient is complete last: no other waits for
// it. `c` is reduced, and may still be under way beside `b`.
TEST(PlannedPeak, KeepsNoGradientsForATiedWeight) {
  const std::vector<ActivationMoment> moments = {{"forward", false, {"a", "b", "c", "a"}},
                                                 {"head", true, {"a"}, {}},
                                                 {"c", true, {"c"}, {"c"}},
                                                 {"b", true, {"b"}, {"b"}, 100'000},
                                                 {"a", true, {}, {"a"}}};
  const auto rank = planned(ShardLevel::kGradients, moments, 4);
  EXPECT_EQ(rank.peak_at, "b");
  EXPECT_NEAR(rank.peak.gradients_in_flight, 48'000, 200);
  EXPECT_NEAR(rank.peak.gradients, 40'000 / 4, 200);
}

TEST(PlannedPeak, RefusesImpossibleMoments) {
  const auto refuses = [](std::vector<ActivationMoment> moments, const std::string& part) {
    expect_error([&] { planned(ShardLevel::kGradients, moments); }, {"options.moments", part});
  };
  refuses({{"odd", false, {"d"}}}, "'d'");
  refuses({{"odd", true, {}, {"d"}}}, "'d'");
  refuses({{"odd", false, {}, {}, -1}}, "-1");
  refuses({{"first", true}, {"second", false}}, "'second'");
  expect_error([] { plan_report(kLayers, {}, {.activations = -1}); }, {"activations", "-1"});
  expect_error([] { plan_report(kLayers, {}, {.activations = 1, .moments = moments_of(0)}); },
               {"exclude each other"});
}

TEST(ActivationMoments, NameEachGradientOnce) {
  for (const TransformerConfig& config : small_configs()) {
    for (const bool checkpoint : {false, true}) {
      std::vector<std::string> made;
      for (const ActivationMoment& moment :
           activation_moments(config, {.sequence = 16, .checkpoint = checkpoint}))
        made.insert(made.end(), moment.gradients.begin(), moment.gradients.end());
      std::vector<std::string> expected;
      for (const ParameterSize& size : parameter_sizes(config)) expected.push_back(size.names[0]);
      std::ranges::sort(made);
      std::ranges::sort(expected);
      EXPECT_EQ(made, expected) << config.type;
    }
  }
}

// V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
// (arXiv 2205.05198), equation 1: a layer keeps sbh (34 + 5 a s / h) bytes in half precision, for a
// sequence s, a batch b, a width h and a heads; without dropout of the scores 2 a s / h instead of
// the 5. LibTorch's function keeps 4 sbh more: it scales queries and keys, whose originals lie in
// one tensor with the values.
TEST(ActivationMoments, OfAGpt3AreThoseOfThePaper) {
  TransformerConfig gpt3{.type = "gpt2", .width = 12288, .hidden = 4 * 12288, .heads = 96};
  gpt3.kv_heads = 96, gpt3.head_dim = 128, gpt3.vocabulary = 1000, gpt3.positions = 2048;
  gpt3.qkv_bias = gpt3.output_bias = gpt3.mlp_bias = true;
  gpt3.dropout = 0.1;
  const auto most = [&](int64_t layers) {
    gpt3.layers = layers;
    int64_t nbytes = 0;
    for (const ActivationMoment& moment :
         activation_moments(gpt3, {.sequence = 2048, .dtype = at::kHalf, .fused_attention = false}))
      nbytes = std::max(nbytes, moment.nbytes);
    return nbytes;
  };
  for (const auto& [dropout, scores] : {std::pair{0.1, 5}, std::pair{0.0, 2}}) {
    gpt3.attention_dropout = dropout;
    const double paper = 2048. * 12288 * (34 + 4 + scores * 96 * 2048. / 12288);
    EXPECT_NEAR(static_cast<double>(most(3) - most(2)) / paper, 1, 0.005);
  }
}

TEST(ActivationMoments, RefuseImpossibleOptions) {
  const TransformerConfig gpt2 = small_configs()[0], llama = small_configs()[1];
  const auto refuses = [](const TransformerConfig& config, const ActivationOptions& options,
                          const std::vector<std::string>& parts) {
    expect_error([&] { activation_moments(config, options); }, parts);
  };
  refuses(llama, {.batch = 0}, {"at least 1", "0 and 1"});
  refuses(llama, {.sequence = -5}, {"at least 1", "-5"});
  refuses(llama, {.batch = 1 << 21, .sequence = 1 << 21}, {"at most"});
  refuses(llama, {.batch = 1 << 20, .sequence = 1 << 20, .fused_attention = false}, {"64 bits"});
  refuses(gpt2, {.sequence = 257}, {"256 positions", "257"});
  refuses(llama, {.dtype = at::kBFloat16, .autocast = at::kHalf}, {"narrower", "BFloat16"});
}

}  // namespace planned_peak_test
}  // namespace tessera
