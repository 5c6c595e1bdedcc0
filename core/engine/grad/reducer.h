#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/group/progress.h"
#include "engine/grad/backward_agreement.h"
#include "engine/grad/grad_bucket.h"
#include "engine/grad/in_flight.h"
#include "engine/grad/open_backwards.h"
#include "engine/grad/replica_queue.h"
#include "engine/grad/unit_gradients.h"

namespace tessera {

struct ReducerOptions {
  double scale = 1;          ///< sums over ranks are multiplied by this
  double predivide = 1;      ///< local gradients are divided by this beforehand
  int64_t bucket_bytes = 0;  ///< most bytes of units reduced together
  /// False: gradients stay with the user, who makes them equal on all ranks.
  bool reduces = true;
};

/// Reduces the gradients of all units, in one order on all ranks, while backward runs.
///
/// See [Note: One order of reductions] in reducer.cpp.
class Reducer final : private GradientSink {
 public:
  /// `listener` must live as long as this.
  Reducer(const std::vector<Unit*>& units, const ShardMesh& mesh, const ReducerOptions& options,
          BackwardListener& listener);

  /// Watches the gradients of all parameters. Gradients that they have already count as of a
  /// backward under `no_sync()`.
  void install();
  /// Stops watching. Reduced gradients are dropped; gradients that stayed with the user are kept.
  void uninstall();

  /// The order in which units are reduced from the next backward on: a permutation.
  void set_order(std::vector<int> order);
  /// Returns the unit of each gradient of the last backward on this rank, in the order in which
  /// they arrived, without the units that it did not complete.
  std::vector<int> completed() const;

  void enter_no_sync() { ++no_sync_; }
  void leave_no_sync() { --no_sync_; }
  bool is_no_sync() const { return no_sync_ > 0; }

  /// All ranks: reduces the gradients that backwards under `no_sync()` have left. Returns false,
  /// with nothing done, if no rank has any.
  bool reduce_waiting();
  /// All ranks, where others run a backward, or else `reduce_waiting()`: takes part in it without a
  /// backward of its own.
  void join_reduction(bool in_backward);
  bool reduces() const { return options_.reduces; }
  /// Returns true if a backward under `no_sync()` has left gradients on this rank.
  bool has_waiting() const { return accumulating_; }

  /// Called at any time in a pass: takes part in the agreement at the end of the other ranks'
  /// backward, and asks all ranks to gather a unit before they go on.
  void ask(int unit) { agreement_.ask(unit); }

  /// Returns true if a parameter has a reduced gradient. Call `settle()` before.
  bool any_live() const;
  /// Returns true if a reduction was started that no `settle()` and no `clear_all()` has waited
  /// for.
  bool is_reducing() const;
  /// All ranks: waits for all reductions.
  void settle();
  /// If there are any, calls `on_settle()`, then waits for them.
  void settle_earlier();
  /// Returns how often each parameter's gradient was cleared since `forget_clears()`.
  std::vector<double> clears() const;
  void forget_clears();
  /// Clears the gradients that another rank has cleared more often, and forgets both. `others`:
  /// begins with what `clears()` returned there.
  void clear_as(const std::vector<double>& others);
  /// Returns true if a backward gave any parameter a gradient since the last clear, the same on all
  /// ranks. Also true, as it cannot be known, where the user reduces or ranks have parameters of
  /// their own.
  bool any_gradient();
  void clear_all();
  /// All ranks: turns all gradients into zeros. They count as used in the next reduction.
  void zero_all();

  const AllGradients& gradients() const { return gradients_; }
  /// The numbers of this model's forwards, backwards and steps. Without `reduces()`, nobody
  /// compares them.
  Lockstep& lockstep() { return agreement_.lockstep(); }
  /// Records the call that `text()` describes: see `Lockstep::record()`. One rank has none to
  /// compare with, and does not make the text.
  template <class Text>
  void record(const Text& text) {
    if (mesh_.size() > 1) lockstep().record(text());
  }
  /// Bytes of the all-reduce at the end of a backward of a model of `slots` parameters.
  static int64_t agreement_nbytes(int64_t slots) { return BackwardAgreement::nbytes(slots); }
  int64_t peak_in_flight_bytes() const { return in_flight_.peak_bytes(); }

 private:
  void take(size_t unit, size_t slot, size_t handle, const at::Tensor& tensor) override;

  AllGradients make_gradients(const std::vector<Unit*>& units);
  template <class F>
  void for_each_handle(F&& f) const;
  void take_given();
  void begin_backward();
  void end_backward(int backward);
  PassVote reduce_arrived(bool done = false);
  void abandon_backward();
  void launch_ready();
  void launch(const std::vector<size_t>& units, const std::string& name);
  void launch_late();
  void replicate(bool waits);
  void forget_progress();
  UnitContext& context() const { return gradients_.front()->unit().context(); }

  ShardMesh mesh_;
  ReducerOptions options_;
  BackwardListener& listener_;
  const AllGradients gradients_;
  BucketOrder order_;
  InFlight in_flight_;
  BackwardAgreement agreement_;
  std::shared_ptr<ReplicaQueue> replicas_;  // null without a replicate dim
  std::vector<int> arrivals_;               // the unit of each gradient of this backward
  int no_sync_ = 0;
  bool accumulating_ = false;  // gradients of a no_sync() backward are waiting
  OpenBackwards backwards_;
  const int64_t number_;  // of the model, in the order in which the ranks shard models
  // While true, there is no warning of gradients that nothing reduces.
  std::shared_ptr<std::atomic<bool>> told_captures_ = std::make_shared<std::atomic<bool>>(false);
  std::recursive_mutex mutex_;  // autograd runs on several threads
};

}  // namespace tessera
