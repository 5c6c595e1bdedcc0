#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "comm/group/progress.h"
#include "engine/grad/grad_bucket.h"
#include "engine/grad/lockstep.h"
#include "engine/grad/open_backwards.h"
#include "engine/grad/replica_queue.h"
#include "engine/grad/unit_gradients.h"

namespace tessera {

/// A request of a rank to all ranks for the end of a backward. They carry out the highest one.
enum class Attention : uint8_t {
  kNone,
  kLearn,   ///< learn the order of use, or choose again how memory is used
  kTakeIn,  ///< adopt parameters that were given other data, and learn
  kGather,  ///< gather units for this rank, whose backward is not over; then vote again
};

/// A rank's vote at the end of a backward. All ranks receive the highest.
struct PassVote {
  Attention attention = Attention::kNone;
  /// How often units were used outside of training since the last vote. In the highest vote, only
  /// ranks with the highest attention count.
  uint8_t uses_in_evaluation = 0;

  static constexpr uint8_t kMostUses = 63;
};

/// Is notified of the ends of a model's backwards, on all ranks. At the end of a backward the calls
/// come in the order below, except for `on_settle()`.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  /// Called before this rank waits for the reductions of the previous backward outside of
  /// `settle()`.
  virtual void on_settle() = 0;
  /// Called before this rank waits for any other rank: starts the collectives that others may be
  /// waiting for.
  virtual void on_backward_end() = 0;
  /// Called before ranks agree on the parameters that were used; `in_backward`: at its end, and not
  /// in `reduce_waiting()`.
  virtual void on_agreement(bool in_backward) = 0;
  /// Returns true if some ranks have run out of data: they start no reduction before the agreement.
  virtual bool is_uneven() const = 0;
  /// Returns this rank's vote.
  virtual PassVote vote() = 0;
  /// Called in the agreement, also in one that `Reducer::ask()` begins: ranks have asked for
  /// `units`.
  virtual void on_asked(const std::vector<int>& units) = 0;
  /// Called last. `synced`: the backward was reduced. `most` is the highest of the ranks' votes;
  /// none if they have not voted.
  virtual void on_pass_end(bool synced, const PassVote& most) = 0;
};

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
class Reducer {
 public:
  /// `listener` must live as long as this.
  Reducer(std::vector<Unit*> units, const ShardMesh& mesh, const ReducerOptions& options,
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
  void ask(int unit);

  /// Returns true if a parameter has a reduced gradient. Call `settle()` before.
  bool any_live() const;
  /// Returns true if a reduction was started that no `settle()` and no `clear_all()` has waited
  /// for.
  bool is_reducing() const;
  /// All ranks: waits for all reductions.
  void settle();
  /// The same, after `on_settle()`, if there are any.
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
  /// All ranks: turns all gradients into zeros, which count as used in the next reduction.
  void zero_all();

  const std::vector<std::shared_ptr<UnitGradients>>& gradients() const { return gradients_; }
  /// The numbers of this model's forwards, backwards and steps. Without `reduces()`, nobody
  /// compares them.
  Lockstep& lockstep() { return lockstep_; }
  /// Records the call that `text()` describes: see `Lockstep::record()`. One rank has none to
  /// compare with, and does not make the text.
  template <class Text>
  void record(const Text& text) {
    if (mesh_.size() > 1) lockstep_.record(text());
  }
  /// Bytes of the all-reduce at the end of a backward of a model of `slots` parameters.
  static int64_t agreement_nbytes(int64_t slots) { return slots + 1 + Lockstep::kBytes; }
  int64_t peak_in_flight_bytes() const { return peak_in_flight_bytes_; }

 private:
  /// Called by the parameters' hooks, on any thread.
  void on_grad(size_t unit, size_t slot, size_t handle, const at::Tensor& tensor);

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
  void limit_in_flight();
  void record_live();
  PassVote agree_on_use(bool done);
  PassVote agree_on_vote();
  std::vector<uint8_t> none_used() const;
  at::Tensor agree(const std::vector<uint8_t>& own);
  at::Tensor highest_of_ranks(const std::vector<uint8_t>& own);
  bool serves(const at::Tensor& highest);
  void check_agreed();
  void forget_progress();

  std::vector<Unit*> units_;
  ShardMesh mesh_;
  ReducerOptions options_;
  bool has_own_ = false;  // some units are each rank's own
  bool frees_ = false;    // some units are freed between uses
  BackwardListener& listener_;
  Progress* progress_;  // of this rank; may be null
  std::vector<std::shared_ptr<UnitGradients>> gradients_;
  std::vector<int> order_;                  // unit indices, in the order of reductions
  std::vector<GradBucket> buckets_;         // runs of that order
  std::set<std::string> names_;             // of buckets, for collectives in flight
  size_t next_ = 0;                         // first bucket that was not launched yet
  std::vector<std::vector<bool>> used_;     // per unit and slot: on any rank since settle()
  std::vector<bool> launched_;              // per unit: in this backward
  std::vector<bool> late_;                  // per unit: more arrived on some rank after the launch
  std::vector<size_t> in_flight_;           // launched in this backward, oldest first
  std::shared_ptr<ReplicaQueue> replicas_;  // null without a replicate dim
  std::vector<int> arrivals_;               // the unit of each gradient of this backward
  int64_t in_flight_bytes_ = 0;
  int64_t peak_in_flight_bytes_ = 0;
  int64_t in_flight_limit_ = 0;
  int no_sync_ = 0;
  bool accumulating_ = false;  // gradients of a no_sync() backward are waiting
  bool in_backward_ = false;
  const bool on_device_;     // gradients, and so reductions, are on a device
  int short_backwards_ = 0;  // in which pauses are short, as one was in vain
  OpenBackwards backwards_;
  const int64_t number_;   // of the model, in the order in which the ranks shard models
  std::string lost_gate_;  // the parameter and the rank; all ranks agree on it
  Lockstep lockstep_;
  // While true, there is no warning of gradients that nothing reduces.
  std::shared_ptr<std::atomic<bool>> told_captures_ = std::make_shared<std::atomic<bool>>(false);
  std::recursive_mutex mutex_;  // autograd runs on several threads
};

}  // namespace tessera
