#include "engine/grad/backward_agreement.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "engine/grad/grad_gate.h"
#include "engine/unit/lost_step.h"

namespace tessera {

// [Note: The agreement at the end of a backward]
//
// One all-reduce of a byte for each parameter, a vote, and the numbers of the Lockstep. Ranks take
// the highest bytes, and so all decide the same.
//
// A rank that is in the middle of its pass and needs a unit takes part in it, too (`ask`): its vote
// is higher than all others, and says that nothing has been agreed on yet. All ranks gather the
// unit and repeat the all-reduce.
namespace {

// A rank reports a parameter as not used (0), used (1), or one of these. A rank that asks for a
// unit reports its first parameter as such and no other.
constexpr uint8_t kLate = 2;
constexpr uint8_t kLostGate = 3;  // plus the rank that lost it
constexpr uint8_t kAsked = std::numeric_limits<uint8_t>::max();

uint8_t lost_gate_of(int rank) {
  return static_cast<uint8_t>(std::min<int>(kLostGate + rank, kAsked - 1));
}

// Encodes a vote as one byte; the ranks take the highest.
uint8_t to_byte(const PassVote& vote) {
  const auto attention = static_cast<uint8_t>(vote.attention);
  return attention * (PassVote::kMostUses + 1) +
         std::min(vote.uses_in_evaluation, PassVote::kMostUses);
}

PassVote to_vote(uint8_t byte) {
  return {.attention = static_cast<Attention>(byte / (PassVote::kMostUses + 1)),
          .uses_in_evaluation = static_cast<uint8_t>(byte % (PassVote::kMostUses + 1))};
}

bool has_lost_gate(const ParamSlot& param) {
  for (size_t i = 0; i < param.handles.size(); ++i) {
    const at::Tensor tensor = param.tensor(i);
    if (tensor.defined() && !has_grad_gate(tensor)) return true;
  }
  return false;
}

}  // namespace

BackwardAgreement::BackwardAgreement(const AllGradients& gradients, const ShardMesh& mesh,
                                     BackwardListener& listener)
    : gradients_(gradients),
      mesh_(mesh),
      listener_(listener),
      launched_(gradients.size(), false),
      late_(gradients.size(), false) {
  for (const auto& unit : gradients) used_.emplace_back(unit->unit().layout().slots.size(), false);
}

void BackwardAgreement::launch(size_t unit) {
  for (size_t slot = 0; slot < used_[unit].size(); ++slot) {
    if (gradients_[unit]->has_arrived(slot)) used_[unit][slot] = true;
  }
  launched_[unit] = true;
}

bool BackwardAgreement::any_used(size_t unit) const {
  return std::find(used_[unit].begin(), used_[unit].end(), true) != used_[unit].end();
}

void BackwardAgreement::forget_used(size_t unit) {
  std::fill(used_[unit].begin(), used_[unit].end(), false);
}

void BackwardAgreement::check() {
  // Gathers that are queued may wait for other ranks without end.
  if (lockstep_.has_lost_gathers()) leave(context(), lockstep_.error());
  lockstep_.check();
  TORCH_CHECK(lost_gate_.empty(), "[tessera] autograd's metadata of parameter ", lost_gate_,
              " was replaced after the model was sharded, and with it the hook that reduces its "
              "gradient. Set hooks with Tensor::register_hook() or "
              "torch::autograd::impl::set_post_acc_grad_hooks(), which keep it");
}

// Records which gradients of earlier backwards this rank adds to, as others must.
void BackwardAgreement::record_live() {
  if (mesh_.size() == 1) return;
  int64_t count = 0;
  size_t hash = 0;
  for (size_t unit = 0; unit < gradients_.size(); ++unit) {
    if (!gradients_[unit]->unit().layout().is_replicated()) continue;
    for (size_t slot = 0; slot < used_[unit].size(); ++slot) {
      if (!gradients_[unit]->is_live(slot)) continue;
      ++count;
      hash = 31 * hash + 1024 * unit + slot;
    }
  }
  if (count > 0)
    lockstep_.record(
        fmt::format("added to {} gradients of earlier backwards, whose numbers have the hash {:x}",
                    count, hash));
}

// Makes `used_` the same on all ranks, compares how far they are, and returns the highest vote.
PassVote BackwardAgreement::agree(bool done) {
  check_in_step(context(), "reduce", "gradients");
  std::vector<uint8_t> own;
  for (size_t unit = 0; unit < gradients_.size(); ++unit) {
    for (size_t slot = 0; slot < used_[unit].size(); ++slot) {
      const bool arrived = gradients_[unit]->has_arrived(slot);
      own.push_back(arrived && launched_[unit] ? kLate : used_[unit][slot] || arrived);
      if (has_lost_gate(gradients_[unit]->unit().layout().slots[slot]))
        own.back() = lost_gate_of(mesh_.rank());
    }
  }
  record_live();
  own.push_back(to_byte(listener_.vote()));
  const size_t vote = own.size() - 1;
  lockstep_.append_to(own, done);
  const at::Tensor highest = highest_until_served(own);
  const auto* const bits = highest.const_data_ptr<uint8_t>();
  if (mesh_.size() > 1) lockstep_.compare(bits + vote + 1, mesh_);
  size_t i = 0;
  for (size_t unit = 0; unit < gradients_.size(); ++unit) {
    late_[unit] = false;
    for (size_t slot = 0; slot < used_[unit].size(); ++slot, ++i) {
      // For a unit that is each rank's own, only this rank's use counts.
      const uint8_t bit = gradients_[unit]->unit().layout().is_replicated() ? bits[i] : own[i];
      used_[unit][slot] = bit != 0;
      late_[unit] = late_[unit] || bit == kLate;
      if (bit >= kLostGate)
        lost_gate_ = "'" + gradients_[unit]->unit().layout().slots[slot].name() + "' on rank " +
                     std::to_string(bit - kLostGate);
    }
  }
  return to_vote(bits[vote]);
}

// Agrees on the vote alone, where nothing is reduced; returns the highest.
PassVote BackwardAgreement::agree_on_vote() {
  std::vector<uint8_t> own = none_used();
  const size_t vote = own.size() - Lockstep::kBytes - 1;
  own[vote] = to_byte(listener_.vote());
  return to_vote(highest_until_served(own).const_data_ptr<uint8_t>()[vote]);
}

// The bytes of a rank that has nothing to report.
std::vector<uint8_t> BackwardAgreement::none_used() const {
  int64_t slots = 0;
  for (const auto& unit : used_) slots += std::ssize(unit);
  return std::vector<uint8_t>(nbytes(slots), 0);
}

// Returns the highest of the ranks' bytes when no rank asks for units any more.
at::Tensor BackwardAgreement::highest_until_served(const std::vector<uint8_t>& own) {
  at::Tensor highest;
  do {
    highest = highest_of_ranks(own);
  } while (serves(highest));
  return highest;
}

at::Tensor BackwardAgreement::highest_of_ranks(const std::vector<uint8_t>& own) {
  const at::Tensor highest = at::empty({std::ssize(own)}, at::kByte);
  std::copy(own.begin(), own.end(), highest.mutable_data_ptr<uint8_t>());
  if (mesh_.size() > 1)
    mesh_.all_reduce(highest, ReduceOp::kMax, {"which parameters were used", Channel::kControl});
  return highest;
}

// Gathers the units for which ranks have asked. Returns false if none has, so that the agreement is
// over.
bool BackwardAgreement::serves(const at::Tensor& highest) {
  const auto* bits = highest.const_data_ptr<uint8_t>();
  std::vector<int> asked;
  for (size_t unit = 0; unit < gradients_.size(); bits += used_[unit++].size())
    if (*bits == kAsked) asked.push_back(static_cast<int>(unit));
  if (to_vote(*bits).attention != Attention::kGather) return false;
  listener_.on_asked(asked);
  return true;
}

// Called by an operator, on any thread, while no gradient is handled.
void BackwardAgreement::ask(int unit) {
  check_in_step(context(), "gather", gradients_[unit]->unit().label());
  std::vector<uint8_t> own = none_used();
  size_t first = 0;
  for (int i = 0; i < unit; ++i) first += used_[i].size();
  own[first] = kAsked;
  own[own.size() - Lockstep::kBytes - 1] = to_byte({.attention = Attention::kGather});
  serves(highest_of_ranks(own));
}

}  // namespace tessera
