#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/shard_plan.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/model/sharded_state.h"
#include "engine/optim/segments.h"

namespace tessera {

/// The steps of one optimizer's parameters over replicas that train by themselves: see `OuterStep`.
///
/// A round is the steps between two averages. Each rank works on its own part of the units
/// (`Unit::updated()`). Its peers in the other replicas have the same part.
///
/// See [Note: Rounds of replicas] in outer_steps.cpp.
class OuterSteps {
 public:
  /// The model's plan must have an `outer`.
  explicit OuterSteps(ShardedState& state);

  /// Bytes of each of the offloaded tensors that this will make.
  std::vector<int64_t> offloaded_sizes() const;

  /// Called before each step, also one that is skipped: keeps the start values of parameters in
  /// `segments` that are trained and that the round has not met yet.
  void begin_step(const std::vector<Segment>& segments);
  /// Returns true if replicas are averaged after the step that has begun.
  bool is_last() const { return position_ + 1 >= options_.every; }
  /// Called after each step, when nothing reads the units: counts it. After the last one of a
  /// round, averages the replicas, sets the units' new values, and sets `changed` for these units.
  /// Collective over both dims then.
  void end_step(std::vector<bool>& changed);

  /// The steps of this round so far.
  int64_t position() const;
  /// Throws `c10::ValueError` between two averages, when this replica's values are its own.
  void check_averaged(const char* what) const;

  /// Bytes of start values, momentum and errors of rounding: all, and those in offload memory.
  int64_t nbytes() const;
  int64_t offloaded_nbytes() const;

  /// The momentum of this rank's part of each parameter, by name and range; views.
  std::map<std::string, at::Tensor> momentum() const;
  /// Throws `c10::ValueError` unless each of these is a part of a parameter that this rank has.
  void check_momentum(const std::map<std::string, at::Tensor>& saved) const;
  /// Sets it, to zero where `saved` has none, and begins a round. A plan without
  /// momentum takes none.
  void set_momentum(const std::map<std::string, at::Tensor>& saved);

 private:
  struct OfUnit {
    std::vector<bool> slots;  // trained in this round
    at::Tensor start;         // this rank's part when the round began
    at::Tensor momentum;      // undefined: zeros
    // What rounding lost of the differences and of the sums for which this replica answers.
    std::shared_ptr<at::Tensor> error;
    at::Tensor sum_error;
    std::string label;  // of its collective
    bool takes_part() const;
  };
  struct Average {
    size_t unit = 0;
    at::Tensor values;
    WorkPtr work;                 // null: one replica
    std::vector<int64_t> bounds;  // of the sums that each replica rounds; empty: none does
    at::Tensor sums;              // those of this one
  };

  void begin_round();
  bool needs_start() const;
  void average(std::vector<bool>& changed);
  Average start_average(size_t unit);
  void start_rounded(Average& average);
  void gather_rounded(Average& average);
  void finish(Average& average);
  at::Tensor new_values(const Unit& unit, OfUnit& own, const at::Tensor& mean) const;
  at::Tensor memory_for(const Unit& unit, at::ScalarType dtype) const;
  template <class F>
  void for_each_part(F&& f) const;

  ShardedState& state_;
  const OuterStep options_;
  ProcessGroup& replicas_;
  const Encoding encoding_;  // of messages to other replicas
  std::vector<OfUnit> units_;
  int64_t position_ = 0;
  int64_t overwrites_ = 0;  // of the state, when the round began
};

}  // namespace tessera
