#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/grad/reducer.h"

namespace tessera {

class MemoryBudget;
class ShardedState;

/// What a model does where its backwards end: gathers that others wait for, this rank's vote, and
/// what the ranks have voted for.
class PassEnds final : public BackwardListener {
 public:
  explicit PassEnds(ShardedState& state);
  ~PassEnds() override;

  /// Lets as many units stay gathered as `nbytes` allow.
  void set_budget(int64_t nbytes);
  /// Called by all ranks after the optimizer has changed the shards: chooses how many units stay
  /// gathered. Returns an error, the same on all ranks, if the budget is too small.
  std::string fit_memory();

  void on_settle() override;
  void on_backward_end() override;
  void on_agreement(bool in_backward) override;
  bool is_uneven() const override;
  PassVote vote() override;
  void on_asked(const std::vector<int>& units) override;
  void on_pass_end(bool synced, const PassVote& most) override;

 private:
  void warn_of_lone_evaluation(const PassVote& most);
  void learn_order();

  ShardedState& state_;
  std::unique_ptr<MemoryBudget> budget_;  // null: the plan has none
  bool warned_ = false;                   // of an evaluation in which this rank took no part
};

}  // namespace tessera
