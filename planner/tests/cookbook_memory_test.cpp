// The memory that a plan predicts for programs of the cookbook, activations included, beside the
// memory of their steps on two ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/planner/plan_report.h>
#include <tessera/planner/traced_moments.h>
#include <tessera/planner/transformer_config.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "planner/tests/measured_peak.h"
#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

// The programs themselves, for their models.
namespace tessera::cookbook_memory_test {
namespace resnet {
#define main resnet_main
#include "examples/cookbook/resnet.cpp"
#undef main
}  // namespace resnet
namespace gpt2 {
#define main gpt2_main
#include "examples/cookbook/gpt2.cpp"
#undef main
}  // namespace gpt2
namespace lora {
#define main lora_main
#include "examples/cookbook/lora.cpp"
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
};

template <class Optimizer, class Options>
auto with_options(Options options) {
  return [options](std::vector<torch::Tensor> trained) {
    return std::make_unique<Optimizer>(std::move(trained), options);
  };
}

// A sharded program and one step of its loop.
template <class M>
class Job {
 public:
  Job(const Program<M>& program, const ShardPlan& plan)
      : program_(program), model_(seeded(3, program.make)), sharded_(fully_shard(model_, plan)) {
    std::vector<torch::Tensor> trained;
    for (const auto& parameter : model_->parameters())
      if (parameter.requires_grad()) trained.push_back(parameter);
    inner_ = program.optimizer(trained);
    optimizer_.emplace(sharded_, *inner_);
  }

  void step(int64_t batch) {
    optimizer_->zero_grad();
    const auto loss_and_held = program_.loss(model_, batch);
    loss_and_held.front().backward();
    if (program_.clips) optimizer_->clip_grad_norm_(1);
    optimizer_->step();
  }
  const ShardedModule& sharded() const { return sharded_; }
  int state_tensors() const { return state_tensors_of(*inner_); }

 private:
  const Program<M>& program_;
  M model_;
  decltype(fully_shard(std::declval<M&>(), ShardPlan{})) sharded_;
  std::unique_ptr<torch::optim::Optimizer> inner_;
  std::optional<ShardedOptimizer> optimizer_;
};

// The moments of a step, from steps in one process with a quarter and half of the rows.
template <class M>
std::vector<ActivationMoment> traced(const Program<M>& program, int64_t batch) {
  std::vector<TracedStep> steps;
  run_world(1, [&](World&) {
    Job<M> job(program, {.unit_bytes = 0});
    for (int i = 0; i < 2; ++i) job.step(batch / 4);
    for (const int64_t rows : {batch / 4, batch / 2}) {
      const MemoryTracer tracer(job.sharded());
      job.step(rows);
      steps.push_back(traced_step(job.sharded(), tracer, rows));
    }
  });
  return traced_moments(steps, batch);
}

// Compares the memory of two ranks with `batch` rows each with what the plan predicts.
template <class M>
void expect_predicted(const std::string& name, const Program<M>& program, int64_t batch,
                      const std::vector<ParameterSize>& sizes,
                      const std::vector<ActivationMoment>& moments) {
  for (const ShardLevel level : kAllLevels) {
    run_world(
        2,
        [&](World& world) {
          const ShardPlan plan{.level = level};
          Job<M> job(program, plan);
          const PlannedRank planned = plan_report(sizes, plan,
                                                  {.ranks = world.size(),
                                                   .rank = world.rank(),
                                                   .state_tensors = job.state_tensors(),
                                                   .moments = moments})
                                          .rank;
          // Where ranks wait for each other, more gradients are under way: the least counts.
          MeasuredPeak measured;
          for (int run = 0; run < 3; ++run) {
            const MeasuredPeak peak = measured_peak(job.sharded(), /*warm_up=*/run == 0 ? 2 : 0,
                                                    /*steps=*/2, [&] { job.step(batch); });
            if (run == 0 || peak.sample.peak_total < measured.sample.peak_total) measured = peak;
          }
          const double ratio = double(planned.peak.total()) / double(measured.sample.peak_total);
          const std::string text = fmt::format(
              "{} level {}: planned {} ({}); measured {}, at most {} kB ({}): {:.3f}\n", name,
              int(level), text_of(planned.peak), planned.peak_at, text_of(measured.sample.bytes),
              measured.sample.peak_total / 1000, memory_event_name(measured.sample.event), ratio);
          if (world.rank() == 0 && std::getenv("TESSERA_SHOW_PEAKS")) fmt::print("{}", text);
          EXPECT_NEAR(ratio, 1, 0.1) << text;
        },
        std::chrono::seconds(60), Transport::kGloo);
  }
}

TEST(CookbookMemory, OfTheResNetIsPredictedFromATrace) {
  const Program<resnet::ResNet> program{
      .make = [] { return resnet::ResNet(); },
      .optimizer = with_options<torch::optim::SGD>(
          torch::optim::SGDOptions(0.2).momentum(0.9).weight_decay(5e-4)),
      .loss = [](resnet::ResNet& model, int64_t batch) -> std::vector<torch::Tensor> {
        const auto images = torch::rand({batch, 1, 8, 8});
        const auto labels = torch::randint(10, {batch}, torch::kLong);
        return {torch::cross_entropy_loss(model(resnet::augmented(images)), labels)};
      }};
  expect_predicted("resnet", program, 32, parameter_sizes(*program.make()), traced(program, 32));
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
      activation_moments(
          config, {.batch = kBatch, .sequence = kLength, .dtype = at::kFloat, .on_cpu = true}));
}

TEST(CookbookMemory, OfLoraIsPredictedFromATrace) {
  const Program<lora::Llama> program{
      .make = [] { return lora::Llama(); },
      .optimizer =
          with_options<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0)),
      .loss = [](lora::Llama& model, int64_t batch) -> std::vector<torch::Tensor> {
        return {model->loss(torch::randint(256, {batch, lora::kSeq + 1}, torch::kLong))};
      },
      .clips = true};
  expect_predicted("lora", program, 8, parameter_sizes(*program.make()), traced(program, 8));
}

}  // namespace tessera::cookbook_memory_test
