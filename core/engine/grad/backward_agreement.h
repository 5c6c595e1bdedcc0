#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/grad/backward_listener.h"
#include "engine/grad/lockstep.h"
#include "engine/grad/unit_gradients.h"

namespace tessera {

/// Which parameters were used, and which of them ranks have begun to reduce; and the agreement on
/// it at the end of a backward, in which the ranks also vote and compare how far they are.
///
/// See [Note: The agreement at the end of a backward] in backward_agreement.cpp.
class BackwardAgreement {
 public:
  /// The arguments must live as long as this.
  BackwardAgreement(const AllGradients& gradients, const ShardMesh& mesh,
                    BackwardListener& listener);

  /// Bytes of the all-reduce for a model of `slots` parameters.
  static int64_t nbytes(int64_t slots) { return slots + 1 + Lockstep::kBytes; }

  /// Takes note that the gradients of a unit that have arrived are being reduced.
  void launch(size_t unit);
  /// Called by all ranks: makes `used()` the same on all, and returns the highest vote. `done`:
  /// this rank has run out of data.
  PassVote agree(bool done);
  /// Agrees on the vote alone, where nothing is reduced; returns the highest.
  PassVote agree_on_vote();
  /// See `Reducer::ask()`.
  void ask(int unit);
  /// Called when the rest of the backward is done: throws, on all ranks alike, if a parameter has
  /// lost its gate or ranks are out of step.
  void check();

  /// By slot: used on any rank since `forget_used()`.
  const std::vector<bool>& used(size_t unit) const { return used_[unit]; }
  bool any_used(size_t unit) const;
  void forget_used(size_t unit);
  /// True if more gradients of the unit arrived, on some rank, after its reduction was started.
  bool is_late(size_t unit) const { return late_[unit]; }
  void forget_launches() { launched_.assign(launched_.size(), false); }

  /// The numbers of this model's forwards, backwards and steps.
  Lockstep& lockstep() { return lockstep_; }

 private:
  void record_live();
  std::vector<uint8_t> none_used() const;
  at::Tensor highest_until_served(const std::vector<uint8_t>& own);
  at::Tensor highest_of_ranks(const std::vector<uint8_t>& own);
  bool serves(const at::Tensor& highest);
  UnitContext& context() const { return gradients_.front()->unit().context(); }

  const AllGradients& gradients_;
  const ShardMesh& mesh_;
  BackwardListener& listener_;
  std::vector<std::vector<bool>> used_;  // per unit and slot: on any rank
  std::vector<bool> launched_;           // per unit: in this backward
  std::vector<bool> late_;               // per unit
  std::string lost_gate_;                // the parameter and the rank; all ranks agree on it
  Lockstep lockstep_;
};

}  // namespace tessera
