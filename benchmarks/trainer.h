#pragma once

#include <tessera/comm/process_group.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/shard_plan.h>

#include <array>
#include <memory>
#include <string>

#include "benchmarks/workload.h"

namespace tessera::tools {

/// The parts of a step, in the order in which it runs them.
inline constexpr std::array kStepParts = {"zero_grad", "forward",   "backward",
                                          "clip",      "optimizer", "evaluation"};
/// Their seconds, including waits for other ranks. `forward` includes the loss.
using StepParts = std::array<double, kStepParts.size()>;

struct TrainedStep {
  torch::Tensor loss;
  StepParts seconds;
};

/// Trains a model of the step benchmark.
class Trainer {
 public:
  Trainer(std::shared_ptr<BenchModel> model, const LoopSwitches& switches)
      : model_(std::move(model)), switches_(switches) {}
  virtual ~Trainer() = default;

  /// Runs one step: zero_grad, forward, loss, backward, optimizer step, and the loop's other parts.
  /// Measuring it costs only reads of the clock.
  TrainedStep step(const Batch& batch);

  /// Returns what this process keeps between steps.
  virtual ShardMemory kept() const = 0;

  /// Returns the bytes that this rank has sent so far.
  virtual int64_t bytes_sent() const = 0;

 protected:
  BenchModel& model() { return *model_; }

  virtual void zero_grad() = 0;
  /// Runs the backward of one part of the batch; `is_last`: no other part follows before the step.
  virtual void backward(const torch::Tensor& loss, bool is_last) = 0;
  virtual void clip(double max_norm) = 0;
  virtual void set_learning_rate(double rate) = 0;
  virtual void update() = 0;

 private:
  void evaluate(const Batch& batch);

  std::shared_ptr<BenchModel> model_;
  LoopSwitches switches_;
  int64_t steps_ = 0;
};

/// Trains with the other ranks of `plan.process_group`, by `optimizer`: adamw, or muon on whole
/// matrices.
std::unique_ptr<Trainer> make_sharded_trainer(std::shared_ptr<BenchModel> model,
                                              const std::string& optimizer,
                                              const LoopSwitches& switches, ShardPlan plan);

/// Shards by `OSS` and `ShardedDataParallel`, with the plan that they make. Uses only the process
/// group and the size of units of `plan`.
std::unique_ptr<Trainer> make_fairscale_trainer(std::shared_ptr<BenchModel> model, ShardPlan plan);

/// Trains alone, unsharded, with LibTorch's fused AdamW or with `Muon`: the reference. With a
/// process group, after the last backward of each step it waits until those of the other ranks have
/// ended.
std::unique_ptr<Trainer> make_local_trainer(std::shared_ptr<BenchModel> model,
                                            const std::string& optimizer,
                                            const LoopSwitches& switches,
                                            ProcessGroupPtr process_group = nullptr);

}  // namespace tessera::tools
