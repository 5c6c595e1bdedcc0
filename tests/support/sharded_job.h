#pragma once

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <memory>

#include "support/models.h"

namespace tessera::testing {

/// The model of a run, which this rank shards, and its optimizer, to be trained step by step.
/// `N`: the model's class.
template <class N = Net>
struct ShardedJob {
  ShardedJob(const TrainingRun& run, World& world, const ShardPlan& plan = {},
             const ShardedOptimizerOptions& options = {.fused = false})
      : run(run),
        world(world),
        net(std::static_pointer_cast<N>(run.make_net())),
        inner(run.make_optimizer(*net)),
        sharded(fully_shard(net, plan)),
        optimizer(sharded, *inner, options) {}

  /// Of this rank's rows of a batch, in what the model takes for `step`.
  torch::Tensor loss(int batch, int step) {
    return rank_loss(*net, global_batch(batch, run.rows, run.in, run.out),
                     sees_all_rows ? 0 : world.rank(), sees_all_rows ? 1 : world.size(), step);
  }
  torch::Tensor loss(int batch) { return loss(batch, batch); }
  void backward(int batch) { loss(batch).backward(); }
  void backward_without_sync(int batch) {
    const auto guard = sharded.no_sync();
    backward(batch);
  }
  void step(int batch) {
    optimizer.zero_grad();
    backward(batch);
    optimizer.step();
  }
  void train(int first, int last) {
    for (int i = first; i < last; ++i) step(i);
  }
  State state() { return sharded.full_state(); }

  const TrainingRun run;
  World& world;
  std::shared_ptr<N> net;
  std::unique_ptr<torch::optim::Optimizer> inner;
  Sharded<N> sharded;
  ShardedOptimizer optimizer;
  bool sees_all_rows = false;  // as every other rank, so that means are those of one process
};

}  // namespace tessera::testing
