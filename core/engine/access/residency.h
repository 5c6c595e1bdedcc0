#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/access/order_learner.h"
#include "engine/access/plan_cursor.h"
#include "engine/access/running_operators.h"
#include "engine/unit/unit.h"

namespace tessera {

/// Gathers units before they are used and frees them afterwards.
///
/// Follows an order of use that all ranks share, so that all ranks start the same gathers in the
/// same order even if one of them skips a unit. See [Note: One order of gathers] in residency.cpp.
class Residency {
 public:
  /// See the fields of `ShardPlan`.
  struct Limits {
    int64_t resident_bytes = 0;
    int prefetch = 0;
    bool operator==(const Limits&) const = default;
  };

  /// Makes all ranks gather a unit: they call `serve()` with it, this one within this call, the
  /// others when they have ended their pass, or ask themselves.
  using Ask = std::function<void(int unit)>;

  /// Without `ask`, all ranks must use units that the order does not expect at the same time.
  Residency(std::vector<Unit*> units, const Limits& limits, Ask ask = nullptr);

  /// Unshards `units` for one operator that uses them together, and waits for them. Any thread may
  /// call it: see [Note: Several threads] in running_operators.cpp.
  void on_use(const std::vector<Unit*>& units, bool writes);
  /// Called by all ranks, in a use of `unit` that wrote to it: gathers its new values.
  void on_written(Unit& unit);
  /// Ends the use that this thread began last.
  void on_used() noexcept;
  /// While it is held, other threads block in their calls of this class.
  std::unique_lock<std::recursive_mutex> lock() const { return std::unique_lock(mutex_); }
  /// Throws if an operator of another thread uses the model. Does nothing with a single rank.
  void check_unused(const char* call) const;

  /// Called by all ranks where a forward of the handle begins: the evaluation before it is over, if
  /// a pass is not under way. With gradients, a pass begins, whatever its first use is.
  void begin_forward();

  /// Called by all ranks before parameters change: the rest of an evaluation is gathered with the
  /// values that it had on the ranks that are ahead.
  void end_evaluation();

  /// Called by all ranks at the end of backward: runs the planned gathers that this rank has not
  /// reached in this pass, so that all ranks have run the same ones, and frees units that are not
  /// to stay.
  void end_pass();

  /// Called by all ranks, with equal arguments, when each has ended its pass or asks: gathers units
  /// for which ranks have asked. Units that this rank does not need are freed.
  void serve(const std::vector<int>& units);

  /// True until an order has been learned, and again if this pass did not fit the order.
  bool wants_to_learn() const;
  /// The uses of units on this rank since the last `forget_pass()`.
  const PassOrder& used() const { return learner_.used(); }
  void forget_pass();
  /// Number of unit uses outside of training since then. Counted only where units stay gathered
  /// because the ranks share their memory, so that no rank waits for one that skips a unit; else 0.
  int64_t uses_in_evaluation() const { return learner_.uses_in_evaluation(); }
  /// Called by all ranks, with equal arguments: merges the ranks' orders in the pass that ends with
  /// earlier ones, and follows the result from the next pass on.
  void learn(std::vector<PassOrder> ranks);
  /// The order that training passes follow.
  const PassOrder& order() const { return learner_.order(); }

  /// Called by all ranks when the shards of the units with `changed[unit]` have new values. Frees
  /// or re-gathers full parameters and starts the next pass.
  void on_step(const std::vector<bool>& changed);

  /// Called by all ranks, with equal arguments: sets the limits that hold from the next optimizer
  /// step on.
  void set_limits(const Limits& limits) { next_limits_ = limits; }
  int64_t resident_bytes() const { return limits_.resident_bytes; }
  /// Bytes of each unit's full parameters, 0 for units that are not freed between uses.
  std::vector<int64_t> freed_nbytes() const;

  /// Called by all ranks: frees all units that can be freed; does nothing while units are held.
  void free_everything();

  /// Called by all ranks: gathers all units and keeps them until the matching `release_all()`.
  void hold_all();
  /// Neither waits nor throws: units that can't be freed at once are freed at the next use.
  void release_all() noexcept;
  bool is_held() const { return hold_.count > 0; }

 private:
  // The pass or evaluation that is under way.
  struct Pass {
    bool trains = false;    // a use wanted gradients
    bool asks = false;      // it has left the order: its further uses are asked for
    bool is_told = false;   // an evaluation that began with a forward of the handle
    int asked = -1;         // the unit for which this rank asks now
    UseOrder prelude = {};  // uses without gradients since the cursor left its start
  };
  struct Hold {
    int count = 0;
    bool is_released = false;  // the last has ended, but not all units are freed yet
  };
  struct LastUse {
    Unit* unit = nullptr;
    bool trained = false;  // it wanted gradients
  };

  void use(const std::vector<Unit*>& units);
  std::string orders_text() const;
  std::vector<Unit*> in_order(std::vector<Unit*> units) const;
  void use_one(Unit& unit);
  void record(const Unit& unit);
  void show_phase() const;
  bool frees() const { return any_frees_ && hold_.count == 0; }
  bool is_expected(const Unit& unit) const;
  void begin_pass(const Unit& unit);
  void finish_evaluation();
  void free_and_restart();
  ptrdiff_t reach() const;
  bool advance(int unit);
  void leave_order();
  void execute(ptrdiff_t end);
  void free_released();
  void gather(Unit& unit);
  void free(Unit& unit);
  void free_all();
  void restart();
  void plan();

  const std::vector<Unit*> units_;
  Limits limits_;
  Limits next_limits_;  // from the next step on
  const Ask ask_;
  const bool any_frees_;
  const bool stays_shared_;  // units would be freed if the ranks did not share their memory
  OrderLearner learner_;
  PlanCursor cursor_;  // evaluations follow its forward part repeatedly
  Pass pass_;
  Hold hold_;
  LastUse last_;
  std::vector<Unit*> postponed_;  // to be freed when the current operator has ended
  std::vector<bool> ahead_;       // gathered before the plan reached them
  RunningOperators running_;
  mutable std::recursive_mutex mutex_;
};

}  // namespace tessera
