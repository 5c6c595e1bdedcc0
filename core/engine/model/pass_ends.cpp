#include "engine/model/pass_ends.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "engine/model/join_scope.h"
#include "engine/model/memory_budget.h"
#include "engine/model/sharded_state.h"

namespace tessera {
namespace {

// Returns each rank's `order`.
std::vector<UseOrder> orders_of_ranks(const ShardMesh& mesh, const UseOrder& order) {
  if (mesh.size() == 1) return {order};
  const std::string own(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(int));
  std::vector<UseOrder> orders;
  for (const auto& bytes : mesh.all_gather_bytes(own, {"order of use", Channel::kControl})) {
    orders.emplace_back(bytes.size() / sizeof(int));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(orders.back().data()));
  }
  return orders;
}

}  // namespace

PassEnds::PassEnds(ShardedState& state) : state_(state) {}
PassEnds::~PassEnds() = default;

void PassEnds::set_budget(int64_t nbytes) {
  budget_ = std::make_unique<MemoryBudget>(state_, nbytes);
}

void PassEnds::on_settle() {
  if (JoinScope* const scope = state_.join_scope()) scope->announce(JoinCall::kSettle);
}

void PassEnds::on_backward_end() { state_.residency().end_pass(); }

void PassEnds::on_agreement(bool in_backward) {
  state_.announce(in_backward ? JoinCall::kBackward : JoinCall::kReduce);
}

bool PassEnds::is_uneven() const {
  const JoinScope* const scope = state_.join_scope();
  return scope && scope->is_uneven();
}

void PassEnds::on_asked(const std::vector<int>& units) { state_.residency().serve(units); }

PassVote PassEnds::vote() {
  PassVote vote;
  if (state_.residency().wants_to_learn() || (budget_ && budget_->wants_attention()))
    vote.attention = Attention::kLearn;
  if (!state_.replaced().empty()) vote.attention = Attention::kTakeIn;
  const int64_t uses = state_.residency().uses_in_evaluation();
  vote.uses_in_evaluation = static_cast<uint8_t>(std::min<int64_t>(uses, PassVote::kMostUses));
  return vote;
}

// Where ranks share memory, no rank waits for one that does not evaluate, and so that could go
// unnoticed until the program runs elsewhere.
void PassEnds::warn_of_lone_evaluation(const PassVote& most) {
  const bool took_part = vote().uses_in_evaluation >= most.uses_in_evaluation;
  if (took_part || std::exchange(warned_, true)) return;
  TORCH_WARN(
      "[tessera] another rank has used parameters outside of training (as in an evaluation) more "
      "often than rank ",
      state_.mesh().rank(),
      ". That goes well only where all ranks share the memory of one host: over messages, or on "
      "several hosts, ranks wait for each other in every forward. Evaluate on all ranks, equally "
      "often, or on a copy of the model that has full_state(). This warning is shown once per "
      "model");
}

void PassEnds::on_pass_end(bool synced, const PassVote& most) {
  const Attention attention = most.attention;
  if (synced) warn_of_lone_evaluation(most);
  const auto guard = state_.residency().lock();
  const bool learn = attention != Attention::kNone;
  if (synced && attention == Attention::kTakeIn) state_.take_in_replaced();
  if (learn) learn_order();
  if (budget_) budget_->end_pass(learn);
  // The record of several passes would be all forwards, then all backwards.
  state_.residency().forget_pass();
}

std::string PassEnds::fit_memory() { return budget_ ? budget_->choose() : ""; }

void PassEnds::learn_order() {
  const std::vector<UseOrder> forward =
      orders_of_ranks(state_.mesh(), state_.residency().used().forward);
  const std::vector<UseOrder> backward =
      orders_of_ranks(state_.mesh(), state_.residency().used().backward);
  std::vector<PassOrder> passes;
  for (size_t rank = 0; rank < forward.size(); ++rank)
    passes.push_back({forward[rank], backward[rank]});
  state_.residency().learn(std::move(passes));
  // Orders all units, so that one which some rank did not complete comes last on all. A rank
  // without gradients, as one that is done, has no say.
  const int count = static_cast<int>(state_.units().size());
  UseOrder completed = state_.reducer().completed();
  if (!completed.empty()) completed = reduction_order(completed, count);
  completed = merge_orders(orders_of_ranks(state_.mesh(), completed));
  state_.reducer().set_order(reduction_order(completed, count));
}

}  // namespace tessera
