#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/memory/memory_watch.h"
#include "engine/access/use_order.h"
#include "engine/model/memory_count.h"

namespace tessera {

/// Chooses how many units stay gathered, so that all memory that a rank holds stays within a
/// budget. See [Note: A budget of memory] in memory_budget.cpp.
class MemoryBudget final : public MemoryListener {
 public:
  /// Not collective. `state` owns it.
  MemoryBudget(ShardedState& state, int64_t budget);
  ~MemoryBudget() override;

  void before_change() override;
  void on_memory(MemoryEvent event, const std::string& unit) override;

  /// True if this rank has held more than when residency was chosen, and more than the budget.
  bool wants_attention() const;
  /// Called at the end of a backward, before its uses are forgotten. `attention`: some rank wants
  /// it, or the order of use was learned.
  void end_pass(bool attention);

  /// Called by all ranks after a step of the optimizer: chooses, if there is reason to. Returns why
  /// even one unit does not fit, the same on all ranks, or an empty text.
  std::string choose();

 private:
  size_t place() const;
  int64_t held(const MemoryBytes& bytes) const;
  void note(const MemoryBytes& bytes);
  void spread(const MemoryBytes& peak, size_t begin, size_t end);
  std::vector<int64_t> least_room() const;
  int64_t need(const MemoryBytes& peak) const;
  std::string describe_misfit(const std::vector<int64_t>& gathered) const;

  ShardedState& state_;
  const int64_t budget_;
  MemoryCount count_;
  // Peaks of the memory that is held beside gathered parameters:
  MemoryBytes outside_;            // before the first use of a pass and after its end
  std::vector<MemoryBytes> pass_;  // by number of uses in this pass
  std::vector<MemoryBytes> at_;    // by position in `order_`
  UseOrder order_;
  bool pending_ = false;  // all ranks: to choose at the next step
  bool chosen_ = false;   // all ranks
  bool exceeded_ = false;
  bool warned_ = false;
};

}  // namespace tessera
