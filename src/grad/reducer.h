#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "grad/grad_bucket.h"
#include "grad/open_backwards.h"
#include "grad/unit_gradients.h"

namespace tessera {

/// What a rank wants the ranks to do together at the end of a backward. All do the most that any
/// wants.
enum class Attention : uint8_t {
  kNone,
  kLearn,   ///< learn the order of use, or choose what memory is for
  kTakeIn,  ///< take in parameters that were given other data, and learn
};

/// What a rank says of itself at the end of a backward. All hear the most.
struct PassVote {
  Attention attention = Attention::kNone;
  /// How often units were used outside of training since the last vote; told of those ranks only
  /// that want most attention.
  uint8_t uses_in_evaluation = 0;

  static constexpr uint8_t kMostUses = 63;
};

/// Is told of the ends of a model's backwards, on all ranks. A backward that ends calls these in
/// their order, but for `on_settle()`.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  /// In a backward, before this rank waits for the reductions of the one before.
  virtual void on_settle() = 0;
  /// Before this rank waits for any other: starts the collectives that others may be waiting for.
  virtual void on_backward_end() = 0;
  /// Before ranks agree on the parameters that were used. `has_earlier`: earlier backwards have left
  /// gradients.
  virtual void on_agreement(bool has_earlier) = 0;
  /// This rank's vote.
  virtual PassVote vote() = 0;
  /// `synced`: the backward was reduced, and `most` is the highest of the ranks' votes.
  virtual void on_pass_end(bool synced, const PassVote& most) = 0;
};

struct ReducerOptions {
  double scale = 1;          ///< sums over ranks are multiplied by this
  double predivide = 1;      ///< and local gradients are divided by this before
  int64_t bucket_bytes = 0;  ///< units are reduced together up to this size
  /// False where gradients stay with the user, who makes them equal on all ranks.
  bool reduces = true;
};

/// Reduces the gradients of all units, in one order on all ranks, while backward runs.
///
/// See [Note: One order of reductions] in reducer.cpp.
class Reducer : public GradTaker {
 public:
  /// `listener` lives as long as this.
  Reducer(std::vector<Unit*> units, const ShardMesh& mesh, const ReducerOptions& options,
          BackwardListener& listener);

  /// Watches the gradients of all parameters. Those that they have count as of a backward under
  /// `no_sync()`.
  void install();
  /// Leaves them alone again. What was reduced is forgotten; what stayed with the user is kept.
  void uninstall();

  void set_order(std::vector<int> order);

  void enter_no_sync() { ++no_sync_; }
  void leave_no_sync() { --no_sync_; }
  bool is_no_sync() const { return no_sync_ > 0; }

  /// All ranks: reduces what backwards under `no_sync()` have left. False, and nothing is done, if
  /// no rank has anything.
  bool reduce_waiting();
  /// All ranks, where others have a backward: takes part in it with nothing. `has_earlier` is
  /// theirs: if earlier backwards have left them nothing, they have cleared it, and so does this.
  void join_backward(bool has_earlier);
  bool reduces() const { return options_.reduces; }
  /// True if a backward under `no_sync()` has left gradients on this rank.
  bool has_waiting() const { return accumulating_; }

  /// All ranks: waits for all reductions.
  void settle();
  /// True if a backward gave any parameter a gradient since the last clear. All ranks agree; where
  /// the user reduces, or ranks have parameters of their own, nobody knows, and so it is true.
  bool any_gradient();
  void clear_all();
  /// All ranks: makes zeros of all gradients, which count as used in the next reduction.
  void zero_all();

  const std::vector<std::shared_ptr<UnitGradients>>& gradients() const { return gradients_; }
  int64_t peak_in_flight_bytes() const { return peak_in_flight_bytes_; }

 private:
  /// Called by the parameters' hooks, on any thread.
  void on_grad(size_t unit, size_t slot, size_t handle, const at::Tensor& tensor) override;

  template <class F>
  void for_each_handle(F&& f) const;
  void take_given(size_t unit, size_t slot, size_t handle, const at::Tensor& grad);
  void take_all_given();
  void drop_given();
  void check_taken() const;
  bool has_lost_gate(size_t unit, size_t slot) const;
  void begin_backward();
  void end_backward(int backward);
  PassVote reduce_arrived();
  bool any_live() const;
  void settle_earlier();
  void abandon_backward();
  void launch_ready();
  void launch(const std::vector<size_t>& units, const std::string& name);
  void launch_late();
  void replicate_reduced();
  void replicate_all();
  void limit_in_flight();
  PassVote agree_on_use();
  void check_gates() const;
  void forget_progress();

  std::vector<Unit*> units_;
  ShardMesh mesh_;
  ReducerOptions options_;
  bool has_own_ = false;  // units that other ranks have nothing to do with
  BackwardListener& listener_;
  std::vector<std::shared_ptr<UnitGradients>> gradients_;
  std::vector<int> order_;               // of reductions: unit indices
  std::vector<GradBucket> buckets_;      // of that order
  std::set<std::string> names_;          // of buckets, for collectives that are under way
  size_t next_ = 0;                      // the first bucket that was not launched yet
  std::vector<std::vector<bool>> used_;  // per unit and slot: on any rank, since the last settle
  std::vector<bool> launched_;           // per unit: in this backward
  std::vector<bool> late_;               // per unit: more arrived on some rank after the launch
  std::vector<size_t> in_flight_;        // launched in this backward, oldest first
  std::deque<size_t> unreplicated_;      // launched, with a replicate dim to follow, oldest first
  int64_t in_flight_bytes_ = 0;
  int64_t peak_in_flight_bytes_ = 0;
  int64_t in_flight_limit_ = 0;
  int no_sync_ = 0;
  bool accumulating_ = false;  // gradients of a no_sync() backward are waiting
  bool in_backward_ = false;
  OpenBackwards backwards_;
  std::string lost_gate_;  // of which parameter, and on which rank; agreed by all
  // While true, nothing is said of gradients that nobody reduces.
  std::shared_ptr<std::atomic<bool>> told_captures_ = std::make_shared<std::atomic<bool>>(false);
  std::recursive_mutex mutex_;  // autograd works in several threads
};

}  // namespace tessera
