#pragma once

// A training job that is saved and loaded, for the tests of this folder.
#include <fmt/format.h>

#include "checkpoint/tests/saved_model.h"

namespace tessera::testing {

inline torch::optim::AdamWOptions adamw_options(double lr) {
  return torch::optim::AdamWOptions(lr).weight_decay(0.02).amsgrad(true);
}

/// A sharded model with its optimizer, on one rank.
struct Job {
  Job(uint64_t seed, const ShardPlan& plan, double lr = 0.01)
      : module(make_picture(seed)),
        sharded(fully_shard(module, plan)),
        inner(module->parameters(), adamw_options(lr)),
        optimizer(sharded, inner) {}

  void train(int64_t first, int64_t last) {
    for (int64_t step = first; step < last; ++step) train_step(*module, optimizer, step);
  }

  std::shared_ptr<Picture> module;
  Sharded<Picture> sharded;
  torch::optim::AdamW inner;
  ShardedOptimizer optimizer;
};

/// Every level, both partitions.
inline const std::vector<ShardPlan>& plans() {
  static const std::vector<ShardPlan> kPlans = {
      {.level = ShardLevel::kNone, .unit_bytes = 1 << 20},
      {.level = ShardLevel::kGradients, .unit_bytes = 900},
      {.level = ShardLevel::kGradients, .partition = Partition::kWholeParam, .unit_bytes = 2000},
      {.unit_bytes = 1000},
      {.partition = Partition::kWholeParam, .unit_bytes = 1 << 20},
      {.level = ShardLevel::kOptimizerState, .unit_bytes = 1500},
  };
  return kPlans;
}

/// The state of an uninterrupted run when it saves, and two steps later.
struct Saved {
  int ranks;
  ShardPlan plan;
  bool whole;  // whole_parameters
  std::filesystem::path path;
  std::vector<NamedTensor> state, later;

  std::string describe() const {
    return testing::describe(ranks, plan) + (whole ? ", whole parameters" : "");
  }
};

inline Saved save_in_middle(int ranks, const ShardPlan& plan, bool whole,
                            const std::filesystem::path& path) {
  Saved saved{ranks, plan, whole, path, {}, {}};
  run_world(ranks, [&](World& world) {
    Job job(1, plan);
    job.train(0, 2);
    job.inner.param_groups()[0].options().set_lr(0.005);
    save_checkpoint(path, job.sharded, &job.optimizer,
                    {.numbers = {{"step", 2}}, .whole_parameters = whole});
    const auto state = job.sharded.full_state();
    job.train(2, 4);
    const auto later = job.sharded.full_state();
    if (world.rank() == 0) saved.state = state, saved.later = later;
  });
  return saved;
}

}  // namespace tessera::testing
