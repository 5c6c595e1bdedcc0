#pragma once

#include <tessera/comm/process_group.h>
#include <tessera/engine/shard_plan.h>
#include <tessera/engine/sharded_optimizer.h>

#include <memory>
#include <utility>

#include "benchmarks/workload.h"

namespace tessera::tools {

/// Bytes that one process keeps between steps, and the peaks of a sharded one on top of them.
struct KeptBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer_state = 0;
  int64_t peak_unsharded = 0;
  int64_t peak_in_flight = 0;
};

/// Seconds of the parts of one step, including waits for other ranks.
struct StepParts {
  double zero_grad = 0;
  double forward = 0;  ///< the loss, too
  double backward = 0;
  double clip = 0;
  double optimizer = 0;
  double evaluation = 0;
};

/// Its members by name, in the order in which a step runs them.
inline constexpr std::pair<const char*, double StepParts::*> kStepParts[] = {
    {"zero_grad", &StepParts::zero_grad}, {"forward", &StepParts::forward},
    {"backward", &StepParts::backward},   {"clip", &StepParts::clip},
    {"optimizer", &StepParts::optimizer}, {"evaluation", &StepParts::evaluation},
};

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

  virtual KeptBytes kept() const = 0;

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

/// Trains with the other ranks of `plan.process_group`.
std::unique_ptr<Trainer> make_sharded_trainer(std::shared_ptr<BenchModel> model,
                                              const LoopSwitches& switches, ShardPlan plan);

/// The same by `OSS` and `ShardedDataParallel`, with the plan that they make. Of `plan`, only the
/// process group and the size of units are used.
std::unique_ptr<Trainer> make_fairscale_trainer(std::shared_ptr<BenchModel> model, ShardPlan plan);

/// Trains alone, unsharded, with LibTorch's fused AdamW: the reference. With a process group, after
/// the last backward of each step it waits until those of the other ranks have ended.
std::unique_ptr<Trainer> make_local_trainer(std::shared_ptr<BenchModel> model,
                                            const LoopSwitches& switches,
                                            ProcessGroupPtr process_group = nullptr);

}  // namespace tessera::tools
