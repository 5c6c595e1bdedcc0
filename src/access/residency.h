#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "access/running_operators.h"
#include "access/use_order.h"
#include "unit/unit.h"

namespace tessera {

/// Gathers units before they are used and frees them afterwards.
///
/// Follows an order of use that all ranks share, so that all ranks start the same gathers in the
/// same order even if one of them skips a unit. See [Note: One order of gathers] in residency.cpp.
class Residency {
 public:
  Residency(std::vector<Unit*> units, int64_t resident_bytes, int prefetch);

  /// Makes `units`, which one operator uses together, unsharded. Any thread: see [Note: Several
  /// threads] in running_operators.cpp.
  void on_use(const std::vector<Unit*>& units, bool writes);
  /// The operator is over.
  void on_used() noexcept;
  /// While it is held, other threads wait in all that they call here.
  std::unique_lock<std::recursive_mutex> lock() const { return std::unique_lock(mutex_); }
  /// Throws if an operator of another thread uses the model, where there are several ranks.
  void check_unused(const char* call) const;

  /// All ranks, at the end of backward: does the gathers that this rank did not come to in this
  /// pass, so that all have done the same ones, and frees what is not to stay.
  void end_pass();

  /// True until an order is learned, and if this pass did not fit the order.
  bool wants_to_learn() const;
  /// What this rank used since the last `forget_pass()`.
  const PassOrder& used() const { return used_; }
  void forget_pass();
  /// How often units were used outside of training since then, where nobody waits for ranks that
  /// don't use them only because the ranks share their memory; else 0.
  int64_t uses_in_evaluation() const { return uses_in_evaluation_; }
  /// All ranks, with equal arguments: follow `pass` from the next pass on.
  void learn(const PassOrder& pass);
  /// The order that training passes follow.
  const PassOrder& order() const { return order_; }

  /// All ranks: the shards of the units with `changed[unit]` have new values. Frees or re-gathers
  /// full parameters and starts the next pass.
  void on_step(const std::vector<bool>& changed);

  /// All ranks, with equal arguments: another limit, from the next step of the optimizer on.
  void set_resident_bytes(int64_t resident_bytes);
  int64_t resident_bytes() const { return resident_bytes_; }
  int prefetch() const { return prefetch_; }
  /// Bytes of each unit's full parameters, 0 if they are not freed between uses.
  std::vector<int64_t> freed_nbytes() const;

  /// All ranks: frees all units that can be freed, unless they are held.
  void free_everything();

  /// All ranks: gathers everything and leaves it so until the matching call.
  void hold_all();
  /// Waits for nothing and does not throw: what can't be freed at once goes with the next use.
  void release_all() noexcept;
  bool is_held() const { return held_ > 0; }

 private:
  // A position in an order of use, and what to do on the way.
  struct Cursor {
    UseOrder order;
    std::vector<ResidencyStep> steps;
    int position = -1;
  };

  void use(const std::vector<Unit*>& units);
  std::vector<Unit*> in_order(std::vector<Unit*> units) const;
  void use_one(Unit& unit);
  void record(const Unit& unit);
  bool begins_sweep(const Unit& unit) const;
  Cursor& cursor_for(const Unit& unit, bool trains);
  void begin_sweep();
  void end_sweep();
  void begin_pass(const Unit& unit);
  void finish(Cursor& cursor);
  void finish_evaluation();
  void finish_both();
  ptrdiff_t forward_end() const { return std::ssize(order_.forward); }
  ptrdiff_t reach(const Cursor& cursor) const;
  ptrdiff_t find_ahead(const Cursor& cursor, int unit, ptrdiff_t end) const;
  bool advance(Cursor& cursor, int unit);
  void execute(const Cursor& cursor, int from, int to);
  void free_released();
  void gather(Unit& unit);
  void free(Unit& unit);
  void free_all();
  void restart();
  Cursor make_cursor(UseOrder order) const;

  std::vector<Unit*> units_;
  int64_t resident_bytes_;
  int64_t next_limit_;  // `resident_bytes_` from the next step on
  int prefetch_;
  bool any_frees_ = false;
  bool several_ranks_ = false;
  bool stays_shared_ = false;  // would be freed, but for memory that the ranks share
  bool learned_ = false;
  bool deviated_ = false;
  int held_ = 0;
  bool released_ = false;  // the last hold has ended, and not everything is freed yet
  bool trains_ = false;    // gradients were wanted since the last `restart()`
  PassOrder order_;
  Cursor training_;   // evaluations between passes follow its forward part, again and again
  Cursor sweep_;      // the same part, for an evaluation in the middle of a pass
  UseOrder prelude_;  // uses without gradients since the cursor left its start
  PassOrder used_;
  int64_t uses_in_evaluation_ = 0;
  PassOrder mine_;  // what this rank used in the pass that the order was learned from
  Unit* last_ = nullptr;
  bool last_trained_ = false;     // gradients were wanted at its use
  std::vector<Unit*> in_use_;     // by the current operator
  std::vector<Unit*> postponed_;  // to be freed when the current operator is over
  std::vector<bool> pinned_;      // belong to the pass that an evaluation interrupts
  std::vector<bool> ahead_;       // gathered before the plan came to it
  RunningOperators running_;
  mutable std::recursive_mutex mutex_;
};

}  // namespace tessera
