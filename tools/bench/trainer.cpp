#include "bench/trainer.h"

#include <tessera/dialects/fairscale.h>
#include <tessera/fully_shard.h>
#include <tessera/process_group.h>
#include <tessera/sharded_optimizer.h>

#include <chrono>
#include <optional>
#include <utility>

namespace tessera::tools {
namespace {

using torch::Tensor;

constexpr double kLearningRate = 3e-4;
constexpr double kWeightDecay = 0.1;
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.999;
constexpr double kEpsilon = 1e-8;

// Seconds since it was made, or since the last lap.
class LapClock {
 public:
  double lap() {
    const auto last = std::exchange(last_, Clock::now());
    return std::chrono::duration<double>(last_ - last).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

torch::optim::AdamWOptions adamw_options() {
  return torch::optim::AdamWOptions(kLearningRate)
      .betas({kBeta1, kBeta2})
      .eps(kEpsilon)
      .weight_decay(kWeightDecay);
}

template <class Optimizer>
TrainedStep timed_step(BenchModel& model, Optimizer& optimizer, const Batch& batch) {
  StepParts seconds;
  LapClock clock;
  optimizer.zero_grad();
  seconds.zero_grad = clock.lap();
  auto loss = model.loss(batch);
  seconds.forward = clock.lap();
  loss.backward();
  seconds.backward = clock.lap();
  optimizer.step();
  seconds.optimizer = clock.lap();
  return {.loss = loss.detach(), .seconds = seconds};
}

KeptBytes kept_of(const ShardMemory& memory) {
  return {.parameters = memory.parameters,
          .gradients = memory.gradients,
          .optimizer_state = memory.optimizer_state,
          .peak_unsharded = memory.peak_unsharded,
          .peak_in_flight = memory.peak_in_flight};
}

class ShardedTrainer : public Trainer {
 public:
  ShardedTrainer(std::shared_ptr<BenchModel> model, const ShardPlan& plan,
                 std::shared_ptr<CountingProcessGroup> counting,
                 const ShardedOptimizerOptions& options)
      : counting_(std::move(counting)),
        sharded_(fully_shard(std::move(model), plan)),
        adamw_(sharded_->parameters(), adamw_options()),
        optimizer_(sharded_, adamw_, options) {}

  TrainedStep step(const Batch& batch) override { return timed_step(*sharded_, optimizer_, batch); }
  KeptBytes kept() const override { return kept_of(optimizer_.memory()); }

  int64_t bytes_sent() const override { return counting_->counts().bytes_sent(); }

 private:
  std::shared_ptr<CountingProcessGroup> counting_;
  Sharded<BenchModel> sharded_;
  torch::optim::AdamW adamw_;
  ShardedOptimizer optimizer_;
};

class FairscaleTrainer : public Trainer {
 public:
  FairscaleTrainer(std::shared_ptr<BenchModel> model, std::optional<int64_t> unit_bytes,
                   std::shared_ptr<CountingProcessGroup> counting)
      : counting_(std::move(counting)),
        optimizer_(model->parameters(), adamw_options(), {.group = counting_}),
        model_(std::move(model), optimizer_, options_of(unit_bytes)) {}

  TrainedStep step(const Batch& batch) override {
    return timed_step(model_.module(), optimizer_, batch);
  }
  KeptBytes kept() const override { return kept_of(optimizer_.memory()); }
  int64_t bytes_sent() const override { return counting_->counts().bytes_sent(); }

 private:
  static fairscale::ShardedDataParallelOptions options_of(std::optional<int64_t> unit_bytes) {
    fairscale::ShardedDataParallelOptions options;
    if (unit_bytes) options.reduce_buffer_size = *unit_bytes / static_cast<int64_t>(sizeof(float));
    return options;
  }

  std::shared_ptr<CountingProcessGroup> counting_;
  fairscale::OSS<torch::optim::AdamW> optimizer_;
  fairscale::ShardedDataParallel<BenchModel> model_;
};

int64_t bytes_of(const std::vector<Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.defined() ? tensor.nbytes() : 0;
  return bytes;
}

class LocalTrainer : public Trainer {
 public:
  LocalTrainer(std::shared_ptr<BenchModel> model, ProcessGroupPtr process_group)
      : model_(std::move(model)),
        process_group_(std::move(process_group)),
        parameters_(model_->parameters()) {
    for (const auto& parameter : parameters_) {
      exp_avgs_.push_back(torch::zeros_like(parameter));
      exp_avg_sqs_.push_back(torch::zeros_like(parameter));
      state_steps_.push_back(torch::zeros({}, torch::kFloat));
    }
  }

  TrainedStep step(const Batch& batch) override {
    StepParts seconds;
    LapClock clock;
    model_->zero_grad();
    seconds.zero_grad = clock.lap();
    auto loss = model_->loss(batch);
    seconds.forward = clock.lap();
    loss.backward();
    if (process_group_) process_group_->arrive({"step", Channel::kControl})->wait();
    seconds.backward = clock.lap();
    update();
    seconds.optimizer = clock.lap();
    return {.loss = loss.detach(), .seconds = seconds};
  }

  KeptBytes kept() const override {
    KeptBytes kept;
    kept.parameters = bytes_of(parameters_);
    for (const auto& parameter : parameters_) kept.gradients += bytes_of({parameter.grad()});
    kept.optimizer_state = bytes_of(exp_avgs_) + bytes_of(exp_avg_sqs_) + bytes_of(state_steps_);
    return kept;
  }

  int64_t bytes_sent() const override { return 0; }

 private:
  void update() {
    torch::NoGradGuard no_grad;
    std::vector<Tensor> gradients;
    gradients.reserve(parameters_.size());
    for (const auto& parameter : parameters_) gradients.push_back(parameter.grad());
    torch::_foreach_add_(state_steps_, 1);
    at::_fused_adamw_(parameters_, gradients, exp_avgs_, exp_avg_sqs_, /*max_exp_avg_sqs=*/{},
                      state_steps_, kLearningRate, kBeta1, kBeta2, kWeightDecay, kEpsilon,
                      /*amsgrad=*/false, /*maximize=*/false);
  }

  std::shared_ptr<BenchModel> model_;
  ProcessGroupPtr process_group_;
  std::vector<Tensor> parameters_, exp_avgs_, exp_avg_sqs_, state_steps_;
};

}  // namespace

std::unique_ptr<Trainer> make_sharded_trainer(std::shared_ptr<BenchModel> model, ShardPlan plan,
                                              const ShardedOptimizerOptions& options) {
  auto counting = counting_process_group(plan.process_group);
  plan.process_group = counting;
  return std::make_unique<ShardedTrainer>(std::move(model), plan, std::move(counting), options);
}

std::unique_ptr<Trainer> make_fairscale_trainer(std::shared_ptr<BenchModel> model, ShardPlan plan) {
  auto counting = counting_process_group(plan.process_group);
  return std::make_unique<FairscaleTrainer>(std::move(model), plan.unit_bytes, std::move(counting));
}

std::unique_ptr<Trainer> make_local_trainer(std::shared_ptr<BenchModel> model,
                                            ProcessGroupPtr process_group) {
  return std::make_unique<LocalTrainer>(std::move(model), std::move(process_group));
}

}  // namespace tessera::tools
