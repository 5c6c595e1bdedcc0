#include "engine/access/order_learner.h"

#include <bit>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kLongestRecord = 100'000;  // evaluation in grad mode, without a backward

}  // namespace

void OrderLearner::record(int unit, bool in_backward) {
  if (!in_backward) {
    append_use(used_.forward, unit);
    if (used_.forward.size() > kLongestRecord) forget_pass(), deviated_ = true;
    return;
  }
  // Backward begins with the unit that forward ended with; as that was the last unit used, its use
  // in backward was not seen.
  if (used_.backward.empty() && !used_.forward.empty())
    append_use(used_.backward, used_.forward.back());
  append_use(used_.backward, unit);
}

void OrderLearner::end_pass() {
  if (is_sparse()) ++sparse_passes_;
}

void OrderLearner::forget_pass() {
  used_ = {};
  uses_in_evaluation_ = 0;
}

bool OrderLearner::wants_to_learn() const {
  if (!learned_) return true;
  // A second backward of the same forward says nothing about the next pass.
  if (used_.forward.empty()) return false;
  // Where ranks always use parts of the order, learning again is of no use: ever more rarely.
  return deviated_ || (is_sparse() && std::has_single_bit(sparse_passes_));
}

// True if there were far fewer uses than expected: the order may have been learned in an unusual
// pass.
bool OrderLearner::is_sparse() const {
  const size_t uses = used_.forward.size() + used_.backward.size();
  return 4 * uses < 3 * order_.joined().size() && used_ != mine_;
}

void OrderLearner::learn(std::vector<PassOrder> ranks, const std::vector<int>& trainable) {
  history_.add(std::move(ranks));
  const PassOrder known = std::exchange(order_, history_.merged(order_));
  mine_ = used_;
  insert_missing(order_, trainable, known.forward);
  learned_ = true;
  deviated_ = false;
}

}  // namespace tessera
