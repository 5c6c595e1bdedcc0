#pragma once

#include <functional>
#include <vector>

#include "engine/model/sharded_state.h"

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// An optimizer whose steps a rank that has run out of data must take part in.
struct JoinedOptimizer {
  torch::optim::Optimizer* inner = nullptr;    ///< of the `ShardedOptimizer`
  torch::optim::Optimizer* options = nullptr;  ///< its param groups hold the options of `inner`
  std::function<void()> step;
};

/// See `join()`.
void train_joined(ShardedState& state, const std::vector<JoinedOptimizer>& optimizers,
                  const std::function<void()>& train);

/// Announces a step of `inner` with its options, if `join()` is running.
void announce_step(ShardedState& state, torch::optim::Optimizer& inner);

}  // namespace tessera
