#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/access/use_order.h"

namespace tessera {

/// Records this rank's uses of units, and learns the order of use that all ranks follow.
class OrderLearner {
 public:
  explicit OrderLearner(int units) : order_(registration_order(units)) {}

  /// Records a use in a training pass.
  void record(int unit, bool in_backward);
  /// Takes note that this pass did not fit the order.
  void leave_order() { deviated_ = true; }
  void count_evaluation() { ++uses_in_evaluation_; }
  /// Called at the end of a pass, before `forget_pass()`.
  void end_pass();
  void forget_pass();
  /// The uses since `forget_pass()`.
  const PassOrder& used() const { return used_; }
  int64_t uses_in_evaluation() const { return uses_in_evaluation_; }

  bool has_learned() const { return learned_; }
  /// See `Residency::wants_to_learn()`.
  bool wants_to_learn() const;
  /// Called by all ranks, with equal arguments: merges the ranks' orders in the pass that ends with
  /// earlier ones. `trainable`: the units with parameters that require gradients.
  void learn(std::vector<PassOrder> ranks, const std::vector<int>& trainable);
  /// The order that training passes follow.
  const PassOrder& order() const { return order_; }

 private:
  bool is_sparse() const;

  PassOrder order_;
  OrderHistory history_;
  PassOrder used_;
  PassOrder mine_;  // this rank's uses in the pass from which the order was learned
  int64_t uses_in_evaluation_ = 0;
  uint64_t sparse_passes_ = 0;
  bool learned_ = false;
  bool deviated_ = false;
};

}  // namespace tessera
