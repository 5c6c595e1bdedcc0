// The memory that a plan predicts for a step, activations included, beside the memory of a step.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/planner/plan_report.h>
#include <tessera/planner/transformer_config.h>
#include <tessera/tessera.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "planner/tests/described_configs.h"
#include "planner/tests/described_models.h"
#include "planner/tests/measured_peak.h"
#include "support/autocast.h"
#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera {
namespace step_memory_test {

using namespace testing;

constexpr int64_t kBatch = 2, kSequence = 128;

// Trains for some steps, and returns the most memory of the last ones.
MeasuredPeak measure_peak(const TransformerConfig& config, const ActivationOptions& how,
                          const ShardPlan& plan, int steps) {
  constexpr int kWarmUp = 2;  // the order of use is learned in the first step
  const auto net =
      seeded(3, [&] { return std::make_shared<DescribedModel>(config, how.checkpoint); });
  auto sharded = fully_shard(net, plan);
  torch::optim::AdamW inner(net->parameters(), torch::optim::AdamWOptions(1e-3));
  ShardedOptimizer optimizer(sharded, inner);
  const auto ids = torch::randint(config.vocabulary, {how.batch, how.sequence + 1},
                                  at::make_generator<at::CPUGeneratorImpl>(5), torch::kLong);
  return measured_peak(sharded, kWarmUp, steps, [&] {
    optimizer.zero_grad();
    const auto inputs = ids.narrow(1, 0, how.sequence).clone();
    const auto targets = ids.narrow(1, 1, how.sequence).flatten().clone();
    torch::Tensor logits;
    {
      const Autocast autocast(how.autocast);
      logits = net->forward(inputs);
    }
    auto loss = torch::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), targets);
    loss.backward();
    optimizer.step();
  });
}

PlannedRank predict(const TransformerConfig& config, const ActivationOptions& how,
                    const ShardPlan& plan, const World& world, bool shares_memory) {
  return plan_report(parameter_sizes(config), plan,
                     {.ranks = world.size(),
                      .rank = world.rank(),
                      .shares_memory = shares_memory,
                      .moments = activation_moments(config, how)})
      .rank;
}

struct Case {
  ShardLevel level = ShardLevel::kParameters;
  std::optional<at::ScalarType> param_dtype = {}, autocast = {};
  bool checkpoint = false;
  int64_t batch = kBatch, sequence = kSequence;
  std::optional<int64_t> unit_bytes = 400'000;
  int steps = 2;
};

// Within 10 %.
void expect_predicted(World& world, const TransformerConfig& config, const Case& tried,
                      bool shares_memory) {
  ShardPlan plan{.level = tried.level, .precision = {.param_dtype = tried.param_dtype}};
  plan.unit_bytes = tried.unit_bytes;
  const ActivationOptions how{.batch = tried.batch,
                              .sequence = tried.sequence,
                              .dtype = tried.param_dtype.value_or(config.dtype),
                              .autocast = tried.autocast,
                              .checkpoint = tried.checkpoint,
                              .on_cpu = true};
  const PlannedRank planned = predict(config, how, plan, world, shares_memory);
  const MeasuredPeak measured = measure_peak(config, how, plan, tried.steps);
  const double ratio = double(planned.peak.total()) / double(measured.sample.peak_total);
  MemoryBytes seen = measured.sample.bytes;
  seen.other = measured.sample.peak_other;
  const std::string text = fmt::format(
      "{} level {} dtype {} autocast {} checkpoint {} batch {} shared {}: {:.3f}\n  planned  {} "
      "({})\n"
      "  measured {} kB; the tracer: {} ({} {})\n",
      config.type, int(tried.level), tried.param_dtype ? "bf16" : "-",
      tried.autocast ? "bf16" : "-", tried.checkpoint, tried.batch, shares_memory, ratio,
      text_of(planned.peak), planned.peak_at, measured.sample.peak_total / 1000, text_of(seen),
      memory_event_name(measured.sample.event), measured.sample.unit);
  if (world.rank() == 0 && std::getenv("TESSERA_SHOW_PEAKS")) fmt::print("{}", text);
  // How many gradients are under way depends on the speed of the other rank.
  const int64_t late =
      std::max<int64_t>(0, seen.gradients_in_flight - planned.peak.gradients_in_flight);
  EXPECT_GT(double(planned.peak.total() + late), 0.9 * double(measured.sample.peak_total)) << text;
  EXPECT_LT(ratio, 1.1) << text;
}

std::vector<Case> cases() {
  std::vector<Case> cases;
  for (const ShardLevel level : kAllLevels)
    for (const bool checkpoint : {false, true}) cases.push_back({level, {}, {}, checkpoint});
  for (const bool checkpoint : {false, true}) {
    cases.push_back({ShardLevel::kParameters, at::kBFloat16, {}, checkpoint});
    cases.push_back({ShardLevel::kGradients, {}, at::kBFloat16, checkpoint});
  }
  cases.push_back({ShardLevel::kParameters, {}, {}, false, 8});
  return cases;
}

// Tries each of the cases with each of the models: those whose place in the list has the remainder
// `part` of `parts`.
void expect_all_predicted(Transport transport, size_t part, size_t parts) {
  run_world(
      2,
      [&](World& world) {
        size_t place = 0;
        for (const TransformerConfig& config : small_configs())
          for (const Case& tried : cases())
            if (place++ % parts == part)
              expect_predicted(world, config, tried, transport == Transport::kArena);
      },
      std::chrono::seconds(120), transport);
}

// Each case of each model is tried by one of the transports.
TEST(StepMemorySlow, IsPredictedWithinATenthOverMessages) {
  expect_all_predicted(Transport::kGloo, 0, 2);
}
TEST(StepMemorySlow, IsPredictedWithinATenthInSharedMemory) {
  expect_all_predicted(Transport::kArena, 1, 2);
}

TEST(StepMemoryNightly, IsPredictedWithinATenthByBothTransports) {
  for (const Transport transport : {Transport::kGloo, Transport::kArena})
    expect_all_predicted(transport, 0, 1);
}

// Known models, at their real sizes.
TEST(StepMemoryNightly, OfKnownModelsIsPredicted) {
  const ScratchDirectory directory;
  for (const auto& json : {gpt2(), smollm_135m()}) {
    std::ofstream(directory / "config.json") << json.dump();
    TransformerConfig config = read_transformer_config(directory.path());
    config.dtype = at::kFloat;
    config.dropout = config.attention_dropout = 0;
    run_world(
        2,
        [&](World& world) {
          const Case tried{.checkpoint = config.type == "llama",
                           .batch = 1,
                           .sequence = 512,
                           .unit_bytes = std::nullopt,
                           .steps = 1};
          expect_predicted(world, config, tried, false);
        },
        std::chrono::seconds(600), Transport::kGloo);
  }
}

}  // namespace step_memory_test
}  // namespace tessera
