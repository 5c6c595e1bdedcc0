#pragma once

#include <tessera/comm/process_group_decorators.h>

#include <memory>

#include "engine/model/sharded_state.h"
#include "support/sharded_job.h"

namespace tessera::testing {

/// Counters of what is sent over the shards of a world and, if `shard_size` is given, over its
/// replicas.
struct Counters {
  Counters(World& world, int shard_size) {
    if (shard_size == 0) {
      shard = counting_process_group(world.process_group());
      return;
    }
    const auto groups = world.hybrid_process_groups(shard_size);
    shard = counting_process_group(groups.shard);
    replicate = counting_process_group(groups.replicate);
  }
  ShardPlan behind(ShardPlan plan) const {
    plan.process_group = shard;
    plan.replicate_group = replicate;
    return plan;
  }
  void reset_counts() const {
    shard->reset_counts();
    if (replicate) replicate->reset_counts();
  }

  std::shared_ptr<CountingProcessGroup> shard, replicate;
};

/// A job behind counters.
template <class N = Net>
struct CountedJob : Counters, ShardedJob<N> {
  CountedJob(const TrainingRun& run, World& world, const ShardPlan& plan = {},
             const ShardedOptimizerOptions& options = {.fused = false}, int shard_size = 0)
      : Counters(world, shard_size), ShardedJob<N>(run, world, behind(plan), options) {
    reset_counts();
  }
  CollectiveCounts count_step(int batch) {
    reset_counts();
    this->step(batch);
    return shard->counts();
  }
  const UnitLayout& unit(size_t i) const { return this->sharded.state()->units()[i]->layout(); }
  int64_t units() const { return static_cast<int64_t>(this->sharded.state()->units().size()); }
  /// Of all flat buffers.
  int64_t bytes() const {
    int64_t total = 0;
    for (int64_t i = 0; i < units(); ++i) total += unit(i).nbytes();
    return total;
  }
};

}  // namespace tessera::testing
