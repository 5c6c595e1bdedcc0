// The memory that a plan predicts for programs of the cookbook, activations included, beside the
// memory of their steps on two ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/plan_report.h>
#include <tessera/tessera.h>
#include <tessera/transformer_config.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "sim/measured_peak.h"
#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

// The programs themselves, for their models.
namespace tessera::cookbook_memory_test {
namespace resnet {
#define main resnet_main
#include "../../examples/cookbook/resnet.cpp"
#undef main
}  // namespace resnet
namespace gpt2 {
#define main gpt2_main
#include "../../examples/cookbook/gpt2.cpp"
#undef main
}  // namespace gpt2
namespace lora {
#define main lora_main
#include "../../examples/cookbook/lora.cpp"
#undef main
}  // namespace lora

using namespace testing;

// A program's model, its optimizer, and the loss of a batch.
template <class M>
struct Program {
  std::function<M()> make;
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)> optimizer;
  // And tensors that the program's loop holds during backward.
  std::function<std::vector<torch::Tensor>(M&, int64_t batch)> loss;
  bool clips = false;
  double most = 1.1;  // of the memory that is predicted, by the memory of a step
  ShardPlan plan = {};
};

template <class Optimizer, class Options>
auto with_options(Options options) {
  return [options](std::vector<torch::Tensor> trained) {
    return std::make_unique<Optimizer>(std::move(trained), options);
  };
}

template <class M>
MeasuredPeak measure(const Program<M>& program, int64_t batch) {
  M model = seeded(3, program.make);
  auto sharded = fully_shard(model, program.plan);
  std::vector<torch::Tensor> trained;
  for (const auto& parameter : model->parameters())
    if (parameter.requires_grad()) trained.push_back(parameter);
  const auto inner = program.optimizer(trained);
  ShardedOptimizer optimizer(sharded, *inner);
  return measured_peak(sharded, /*warm_up=*/2, /*steps=*/2, [&] {
    optimizer.zero_grad();
    const auto loss_and_held = program.loss(model, batch);
    loss_and_held.front().backward();
    if (program.clips) optimizer.clip_grad_norm_(1);
    optimizer.step();
  });
}

// Compares the memory of two ranks with `batch` rows each with what the plan predicts. Where
// moments do not describe the model, activations are one number, measured in one process with a
// quarter of the rows, and the prediction is an upper bound, as it is the sum of all peaks.
template <class M>
void expect_predicted(const std::string& name, const Program<M>& program, int64_t batch,
                      std::vector<ParameterSize> sizes = {},
                      const PlanReportOptions& described = {}) {
  int64_t activations = 0;
  if (described.moments.empty()) {
    sizes = parameter_sizes(*program.make());
    run_world(1, [&](World&) { activations = 4 * measure(program, batch / 4).activations; });
  }
  for (const ShardLevel level : kAllLevels) {
    run_world(
        2,
        [&](World& world) {
          Program<M> leveled = program;
          leveled.plan.level = level;
          PlanReportOptions options = described;
          options.ranks = world.size();
          options.rank = world.rank();
          options.activations = activations;
          const PlannedRank planned = plan_report(sizes, leveled.plan, options).rank;
          const MeasuredPeak measured = measure(leveled, batch);
          const double ratio = double(planned.peak.total()) / double(measured.sample.peak_total);
          const std::string text = fmt::format(
              "{} level {}: planned {} kB, of them activations {} ({}); measured {} kB: {:.3f}\n",
              name, int(level), planned.peak.total() / 1000, planned.peak.other / 1000,
              planned.peak_at, measured.sample.peak_total / 1000, ratio);
          if (world.rank() == 0 && std::getenv("TESSERA_SHOW_PEAKS")) fmt::print("{}", text);
          EXPECT_GT(ratio, described.moments.empty() ? 0.99 : 0.9) << text;
          EXPECT_LT(ratio, program.most) << text;
        },
        std::chrono::seconds(60), Transport::kGloo);
  }
}

TEST(CookbookMemory, OfTheResNetIsBoundedByThatOfASmallerBatch) {
  const Program<resnet::ResNet> program{
      .make = [] { return resnet::ResNet(); },
      .optimizer = with_options<torch::optim::SGD>(
          torch::optim::SGDOptions(0.2).momentum(0.9).weight_decay(5e-4)),
      .loss = [](resnet::ResNet& model, int64_t batch) -> std::vector<torch::Tensor> {
        const auto images = torch::rand({batch, 1, 8, 8});
        const auto labels = torch::randint(10, {batch}, torch::kLong);
        return {torch::cross_entropy_loss(model(resnet::augmented(images)), labels)};
      },
      .most = 2};  // activations and gradients are greatest at different times
  expect_predicted("resnet", program, 32);
}

TEST(CookbookMemory, OfGpt2IsPredictedFromItsConfig) {
  constexpr int64_t kBatch = 4, kLength = 128;
  const ScratchDirectory directory;
  std::ofstream(directory / "config.json") << nlohmann::json({{"model_type", "gpt2"},
                                                              {"n_embd", 128},
                                                              {"n_head", 4},
                                                              {"n_layer", 4},
                                                              {"n_positions", kLength},
                                                              {"vocab_size", 2000},
                                                              {"resid_pdrop", 0.0},
                                                              {"embd_pdrop", 0.0},
                                                              {"attn_pdrop", 0.0}});
  const auto config = read_transformer_config(directory.path());
  const Program<gpt2::Gpt2> program{
      .make = [&] { return gpt2::Gpt2(gpt2::read_config(directory.path())); },
      .optimizer = with_options<torch::optim::AdamW>(torch::optim::AdamWOptions(3e-5)),
      // The program's loop holds the logits while backward runs.
      .loss = [](gpt2::Gpt2& model, int64_t batch) -> std::vector<torch::Tensor> {
        const auto window = torch::randint(2000, {batch, kLength + 1}, torch::kLong);
        const auto logits = model->forward(window.slice(1, 0, -1)).flatten(0, 1);
        return {torch::cross_entropy_loss(logits.to(torch::kFloat), window.slice(1, 1).flatten()),
                logits};
      },
      .clips = true};
  expect_predicted(
      "gpt2", program, kBatch, parameter_sizes(config),
      {.moments = activation_moments(
           config, {.batch = kBatch, .sequence = kLength, .dtype = at::kFloat, .on_cpu = true})});
}

TEST(CookbookMemory, OfLoraIsBoundedByThatOfASmallerBatch) {
  const Program<lora::Llama> program{
      .make = [] { return lora::Llama(); },
      .optimizer =
          with_options<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0)),
      .loss = [](lora::Llama& model, int64_t batch) -> std::vector<torch::Tensor> {
        return {model->loss(torch::randint(256, {batch, lora::kSeq + 1}, torch::kLong))};
      },
      .clips = true};
  expect_predicted("lora", program, 8);
}

}  // namespace tessera::cookbook_memory_test
