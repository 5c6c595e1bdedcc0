#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "access/use_order.h"
#include "memory/memory_watch.h"
#include "model/memory_count.h"

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
  // The peak of the memory held beside gathered parameters, while use was at one position.
  struct Peak {
    int64_t nbytes = 0;  // without `optimizer_state`
    int64_t optimizer_state = 0;
    MemoryBytes bytes;
  };
  size_t place() const;
  void note(const MemoryBytes& bytes);
  void spread(const Peak& peak, size_t begin, size_t end);
  std::vector<int64_t> least_room() const;
  int64_t need(const Peak& peak) const;
  std::string describe_misfit(const std::vector<int64_t>& gathered) const;

  ShardedState& state_;
  const int64_t budget_;
  MemoryCount count_;
  Peak outside_;            // before the first use of a pass and after its end
  std::vector<Peak> pass_;  // by number of uses in this pass
  UseOrder order_;          // the order that indexes `at_`
  std::vector<Peak> at_;    // by position in the order
  bool pending_ = false;    // all ranks: to choose at the next step
  bool chosen_ = false;     // all ranks
  bool exceeded_ = false;
  bool warned_ = false;
};

}  // namespace tessera
