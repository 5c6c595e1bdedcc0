#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/access/use_order.h"

namespace tessera {

/// An order of use with the plan for it (`plan_residency`), and the position that uses have
/// reached.
class PlanCursor {
 public:
  static constexpr ptrdiff_t kStart = -1;

  /// Plans for another order, and goes back to the start. `nbytes` of 0: a unit that stays.
  void set(const PassOrder& order, const std::vector<int64_t>& nbytes, int64_t resident_bytes,
           int prefetch);
  void restart() { position_ = kStart; }

  /// The uses of a pass.
  const UseOrder& uses() const { return uses_; }
  /// The position behind the last use in forward, and behind all.
  ptrdiff_t forward_end() const { return forward_end_; }
  ptrdiff_t end() const { return std::ssize(uses_); }
  ptrdiff_t position() const { return position_; }
  bool is_at(int unit) const { return position_ >= 0 && uses_[position_] == unit; }
  /// Returns the next position of a unit before `end`; `kStart` if there is none.
  ptrdiff_t find_ahead(int unit, ptrdiff_t end) const;
  /// The units to gather before the first use.
  const std::vector<int>& first_gathers() const { return steps_.front().gather; }

  /// Moves to the position before `end`, and calls `execute` with each step on the way.
  template <class F>
  void advance(ptrdiff_t end, const F& execute) {
    const ptrdiff_t from = position_ + 1;
    for (ptrdiff_t p = from; p < end; ++p) execute(steps_[p]);
    position_ = end - 1;
  }

 private:
  UseOrder uses_;
  ptrdiff_t forward_end_ = 0;
  std::vector<ResidencyStep> steps_;  // at each position
  ptrdiff_t position_ = kStart;
};

}  // namespace tessera
