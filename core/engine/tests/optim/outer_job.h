#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "support/counted_job.h"
#include "support/distinct_parameters.h"

namespace tessera::testing::outer_test {

constexpr int64_t kWidth = 37, kRows = 12, kOut = 5;

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

inline const MakeOptimizer kSgd = [](std::vector<torch::Tensor> params) {
  return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(0.1).momentum(0.9));
};
inline const MakeOptimizer kAdamW = [](std::vector<torch::Tensor> params) {
  return std::make_unique<torch::optim::AdamW>(params, torch::optim::AdamWOptions(1e-2));
};

struct OuterRun {
  std::function<std::shared_ptr<Net>()> make_net = [] {
    return seeded(7, [] { return std::make_shared<Mlp>(kWidth, 2, kOut); });
  };
  MakeOptimizer make_optimizer = kAdamW;
  int replicas = 2, shards = 1, steps = 7;
  int ranks() const { return replicas * shards; }
};

inline TrainingRun training_of(const OuterRun& run) {
  return {.make_net = run.make_net, .make_optimizer = [make = run.make_optimizer](Net& net) {
            return make(distinct_parameters(net));
          }};
}

// A model and its optimizer on one rank.
struct OuterJob : CountedJob<> {
  OuterJob(World& world, const OuterRun& run, const ShardPlan& plan,
           const ShardedOptimizerOptions& options = {.fused = false})
      : CountedJob(training_of(run), world, plan, options, run.shards) {}
};

}  // namespace tessera::testing::outer_test
