#include "benchmarks/trainer.h"

#include <tessera/comm/process_group_decorators.h>
#include <tessera/dialects/fairscale.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/muon.h>
#include <tessera/engine/sharded_optimizer.h>

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
constexpr double kMaxNorm = 1;
constexpr double kLearningRateDecay = 0.01;  // of a schedule, per step
constexpr int64_t kEvaluateEvery = 10;

// Measures the seconds since its construction, or since the last lap.
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

std::unique_ptr<Muon> make_muon(const BenchModel& model) {
  const auto options = MuonOptions(kLearningRate).weight_decay(kWeightDecay);
  auto adamw = options;
  return std::make_unique<Muon>(muon_groups(model, muon_exceptions(), options,
                                            adamw.betas({kBeta1, kBeta2}).adamw_eps(kEpsilon)),
                                options);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const BenchModel& model,
                                                        const std::string& optimizer) {
  if (optimizer == "muon") return make_muon(model);
  return std::make_unique<torch::optim::AdamW>(model.parameters(), adamw_options());
}

// The plan for an optimizer.
ShardPlan with_cuts(ShardPlan plan, const BenchModel& model, const std::string& optimizer) {
  if (optimizer == "muon") plan.cuts = muon_cuts(model, muon_exceptions());
  return plan;
}

void set_rate_of_all(torch::optim::Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
}

// Puts a counting process group into the plan.
std::shared_ptr<CountingProcessGroup> count_in(ShardPlan& plan) {
  auto counting = counting_process_group(plan.process_group);
  plan.process_group = counting;
  return counting;
}

class ShardedTrainer : public Trainer {
 public:
  ShardedTrainer(std::shared_ptr<BenchModel> model, const std::string& optimizer,
                 const LoopSwitches& switches, ShardPlan plan)
      : Trainer(model, switches),
        counting_(count_in(plan)),
        sharded_(fully_shard(model, with_cuts(plan, *model, optimizer))),
        inner_(make_optimizer(*model, optimizer)),
        optimizer_(sharded_, *inner_) {}

  ShardMemory kept() const override { return optimizer_.memory(); }
  int64_t bytes_sent() const override { return counting_->counts().bytes_sent(); }

 private:
  void zero_grad() override { optimizer_.zero_grad(); }
  void backward(const Tensor& loss, bool is_last) override {
    if (is_last) return loss.backward();
    const auto unreduced = sharded_.no_sync();
    loss.backward();
  }
  void clip(double max_norm) override { optimizer_.clip_grad_norm_(max_norm); }
  void set_learning_rate(double rate) override { set_rate_of_all(*inner_, rate); }
  void update() override { optimizer_.step(); }

  std::shared_ptr<CountingProcessGroup> counting_;
  Sharded<BenchModel> sharded_;
  std::unique_ptr<torch::optim::Optimizer> inner_;
  ShardedOptimizer optimizer_;
};

class FairscaleTrainer : public Trainer {
 public:
  FairscaleTrainer(std::shared_ptr<BenchModel> model, ShardPlan plan)
      : Trainer(model, {}),
        counting_(count_in(plan)),
        optimizer_(model->parameters(), adamw_options(), {.group = counting_}),
        model_(std::move(model), optimizer_, options_of(plan.unit_bytes)) {}

  ShardMemory kept() const override { return optimizer_.memory(); }
  int64_t bytes_sent() const override { return counting_->counts().bytes_sent(); }

 private:
  void zero_grad() override { optimizer_.zero_grad(); }
  void backward(const Tensor& loss, bool /*is_last*/) override { loss.backward(); }
  void clip(double max_norm) override { optimizer_.clip_grad_norm(max_norm); }
  void set_learning_rate(double rate) override {
    optimizer_.param_groups()[0].options().set_lr(rate);
  }
  void update() override { optimizer_.step(); }

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
  LocalTrainer(const std::shared_ptr<BenchModel>& model, const std::string& optimizer,
               const LoopSwitches& switches, ProcessGroupPtr process_group)
      : Trainer(model, switches),
        process_group_(std::move(process_group)),
        parameters_(model->parameters()) {
    if (optimizer == "muon") {
      muon_ = make_muon(*model);
      return;
    }
    torch::NoGradGuard no_grad;
    if (switches.bf16) {
      for (const auto& parameter : parameters_) masters_.push_back(parameter.to(torch::kFloat));
    }
    for (const auto& parameter : stepped()) {
      exp_avgs_.push_back(torch::zeros_like(parameter));
      exp_avg_sqs_.push_back(torch::zeros_like(parameter));
      state_steps_.push_back(torch::zeros({}, torch::kFloat));
    }
  }

  ShardMemory kept() const override {
    ShardMemory kept;
    kept.parameters = bytes_of(parameters_);
    for (const auto& parameter : parameters_) kept.gradients += bytes_of({parameter.grad()});
    kept.optimizer_state = bytes_of(exp_avgs_) + bytes_of(exp_avg_sqs_) + bytes_of(state_steps_);
    if (!muon_) return kept;
    for (const auto& [parameter, state] : muon_->state()) {
      const auto& own = static_cast<const MuonParamState&>(*state);
      kept.optimizer_state += bytes_of({own.momentum_buffer(), own.exp_avg(), own.exp_avg_sq()});
    }
    return kept;
  }

  int64_t bytes_sent() const override { return 0; }

 private:
  // The masters or, without any, the parameters themselves.
  const std::vector<Tensor>& stepped() const { return masters_.empty() ? parameters_ : masters_; }

  void zero_grad() override { model().zero_grad(); }
  void backward(const Tensor& loss, bool is_last) override {
    loss.backward();
    if (is_last && process_group_) process_group_->arrive({"step", Channel::kControl})->wait();
  }
  void clip(double max_norm) override { torch::nn::utils::clip_grad_norm_(parameters_, max_norm); }
  void set_learning_rate(double rate) override {
    learning_rate_ = rate;
    if (muon_) set_rate_of_all(*muon_, rate);
  }
  void update() override {
    if (muon_) {
      muon_->step();
      return;
    }
    torch::NoGradGuard no_grad;
    std::vector<Tensor> gradients;
    gradients.reserve(parameters_.size());
    for (const auto& parameter : parameters_)
      gradients.push_back(parameter.grad().to(stepped().front().scalar_type()));
    torch::_foreach_add_(state_steps_, 1);
    at::_fused_adamw_(stepped(), gradients, exp_avgs_, exp_avg_sqs_, /*max_exp_avg_sqs=*/{},
                      state_steps_, learning_rate_, kBeta1, kBeta2, kWeightDecay, kEpsilon,
                      /*amsgrad=*/false, /*maximize=*/false);
    if (!masters_.empty()) torch::_foreach_copy_(parameters_, masters_);
  }

  ProcessGroupPtr process_group_;
  double learning_rate_ = kLearningRate;
  std::unique_ptr<Muon> muon_;  // in place of the fused AdamW, and of its state below
  std::vector<Tensor> parameters_, masters_, exp_avgs_, exp_avg_sqs_, state_steps_;
};

}  // namespace

TrainedStep Trainer::step(const Batch& batch) {
  const int parts = switches_.accumulate ? 2 : 1;
  const auto inputs = batch.inputs.chunk(parts), targets = batch.targets.chunk(parts);
  Tensor loss, sum;  // `loss` keeps its graph until the next one, or the end of the step
  StepParts seconds{};
  auto& [zero_grad_s, forward_s, backward_s, clip_s, optimizer_s, evaluation_s] = seconds;
  LapClock clock;
  zero_grad();
  zero_grad_s = clock.lap();
  for (int part = 0; part < parts; ++part) {
    loss = model().loss({inputs[part], targets[part]});
    if (parts > 1) loss = loss / parts;
    forward_s += clock.lap();
    backward(loss, part + 1 == parts);
    sum = sum.defined() ? sum + loss.detach() : loss.detach();
    backward_s += clock.lap();
  }
  if (switches_.clip) clip(kMaxNorm);
  clip_s = clock.lap();
  if (switches_.schedule) set_learning_rate(kLearningRate / (1 + kLearningRateDecay * steps_));
  update();
  optimizer_s = clock.lap();
  if (++steps_ % kEvaluateEvery == 0 && switches_.evaluate) evaluate(batch);
  evaluation_s = clock.lap();
  return {.loss = sum, .seconds = seconds};
}

void Trainer::evaluate(const Batch& batch) {
  torch::NoGradGuard no_grad;
  model_->eval();
  for (int i = 0; i < 2; ++i) model_->loss(batch).item<double>();
  model_->train();
}

std::unique_ptr<Trainer> make_sharded_trainer(std::shared_ptr<BenchModel> model,
                                              const std::string& optimizer,
                                              const LoopSwitches& switches, ShardPlan plan) {
  return std::make_unique<ShardedTrainer>(std::move(model), optimizer, switches, std::move(plan));
}

std::unique_ptr<Trainer> make_fairscale_trainer(std::shared_ptr<BenchModel> model, ShardPlan plan) {
  return std::make_unique<FairscaleTrainer>(std::move(model), std::move(plan));
}

std::unique_ptr<Trainer> make_local_trainer(std::shared_ptr<BenchModel> model,
                                            const std::string& optimizer,
                                            const LoopSwitches& switches,
                                            ProcessGroupPtr process_group) {
  return std::make_unique<LocalTrainer>(model, optimizer, switches, std::move(process_group));
}

}  // namespace tessera::tools
