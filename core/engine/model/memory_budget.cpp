#include "engine/model/memory_budget.h"

#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera {

// [Note: A budget of memory]
//
// The memory that a rank holds beside gathered parameters changes in the course of a pass:
// activations grow in forward and shrink in backward, while gradients grow. So the room for
// gathered units is not one number, but one for each position of the order of use. The first pass
// gathers as little as it can and is measured: for each use, the peak of memory beside gathered
// parameters until the next use. After the step, when the optimizer has made its state, ranks take
// the least room that any of them has at each position, and bisect for the largest `resident_bytes`
// with which the plan (plan_residency) stays within it everywhere; if there is none, fewer units
// are gathered ahead. All ranks compute the same result, and residency follows the plan anyway; the
// choice takes effect with the next pass.
//
// Later passes are measured, too. If one needs more than any before, and more than the budget, its
// rank votes for attention at the end of the next backward, and the choice is made again. Training
// then goes on even if the budget is exceeded: only the first choice fails.
namespace {

// The largest number in [0, most] that fits; 0 does.
template <class Fits>
int64_t largest(int64_t most, const Fits& fits) {
  if (fits(most)) return most;
  int64_t good = 0, bad = most;
  while (bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    (fits(middle) ? good : bad) = middle;
  }
  return good;
}

std::string describe(const MemoryBytes& bytes) {
  return fmt::format(
      "parameters {}, gradients {}, gradients in flight {}, optimizer state {}, master weights {}, "
      "activations and other {}",
      bytes.parameters, bytes.gradients, bytes.gradients_in_flight, bytes.optimizer_state,
      bytes.master_weights, bytes.other);
}

}  // namespace

MemoryBudget::MemoryBudget(ShardedState& state, int64_t budget)
    : state_(state), budget_(budget), count_(state) {
  state.context().watch.add(*this);
}

MemoryBudget::~MemoryBudget() { state_.context().watch.remove(*this); }

// The number of uses that this rank has made in this pass, counting equal neighbours once.
size_t MemoryBudget::place() const {
  const PassOrder& used = state_.residency().used();
  const bool turned = !used.forward.empty() && !used.backward.empty();
  return used.forward.size() + used.backward.size() - (turned ? 1 : 0);
}

// The bytes held beside gathered parameters.
int64_t MemoryBudget::held(const MemoryBytes& bytes) const {
  return count_.on_device(bytes) - bytes.gathered;
}

void MemoryBudget::note(const MemoryBytes& bytes) {
  const size_t at = place();
  if (at >= pass_.size()) pass_.resize(at + 1);
  MemoryBytes& peak = at == 0 ? outside_ : pass_[at];
  if (held(bytes) > held(peak)) peak = bytes;
}

void MemoryBudget::before_change() { note(count_.close()); }

void MemoryBudget::on_memory(MemoryEvent, const std::string&) {
  MemoryCount::Now now = count_.take();
  now.bytes.other = now.peak_other;
  note(now.bytes);
}

bool MemoryBudget::wants_attention() const {
  return exceeded_ && !state_.residency().used().forward.empty();
}

// The optimizer's state counts with its present size at least: in the first pass there was none.
int64_t MemoryBudget::need(const MemoryBytes& peak) const {
  const int64_t state = state_.context().offload ? 0 : state_.context().watch.optimizer_state();
  return held(peak) + std::max(state - peak.optimizer_state, int64_t{0});
}

void MemoryBudget::spread(const MemoryBytes& peak, size_t begin, size_t end) {
  for (size_t position = begin; position < end; ++position) {
    MemoryBytes& known = at_[position];
    if (need(peak) <= need(known)) continue;
    exceeded_ |= chosen_ && need(peak) + peak.gathered > budget_;
    known = peak;
  }
}

void MemoryBudget::end_pass(bool attention) {
  const UseOrder order = state_.residency().order().joined();
  if (order != order_) at_.assign(order.size(), {});
  order_ = order;
  size_t begin = 0;
  const UseOrder own = state_.residency().used().joined();
  for (size_t i = 0; i < own.size() && i + 1 < pass_.size(); ++i) {
    // As residency does: it executes the positions that it skips.
    const auto next = std::find(order.begin() + static_cast<ptrdiff_t>(begin), order.end(), own[i]);
    const bool is_expected = next != order.end();
    const size_t end = is_expected ? next - order.begin() + 1 : order.size();
    spread(pass_[i + 1], is_expected ? begin : 0, end);
    if (is_expected) begin = end;
  }
  if (!own.empty() && pass_.size() > 1) spread(pass_.back(), begin, order.size());
  pass_.clear();
  if (!attention) return;
  pending_ = true;
  exceeded_ = false;
}

// The least room that any rank has for gathered parameters, at each position and outside of passes.
std::vector<int64_t> MemoryBudget::least_room() const {
  std::vector<int64_t> room;
  for (const MemoryBytes& peak : at_) room.push_back(budget_ - need(peak));
  room.push_back(budget_ - held(outside_));
  if (state_.mesh().size() == 1) return room;
  const at::Tensor least = at::tensor(room, at::kDouble);  // exact for byte counts
  state_.mesh().all_reduce(least, ReduceOp::kMin, {"budget of memory", Channel::kControl});
  std::copy_n(least.const_data_ptr<double>(), room.size(), room.begin());
  return room;
}

std::string MemoryBudget::choose() {
  if (!std::exchange(pending_, false)) return "";
  Residency& residency = state_.residency();
  const std::vector<int64_t> nbytes = residency.freed_nbytes();
  std::vector<int64_t> room = least_room();
  // Outside of passes, the units that the next pass begins with are gathered.
  int prefetch = state_.plan().prefetch;
  const auto gathered_with = [&](int64_t resident) {
    auto gathered = gathered_bytes(plan_residency(order_, nbytes, resident, prefetch), nbytes);
    gathered.push_back(gathered.empty() ? 0 : gathered.front());
    return gathered;
  };
  const auto fits = [&](int64_t resident) {
    const auto gathered = gathered_with(resident);
    return std::equal(gathered.begin(), gathered.end(), room.begin(), std::less_equal<>());
  };
  while (prefetch > 0 && !fits(0)) --prefetch;
  std::string misfit;
  const bool is_first = !std::exchange(chosen_, true);
  if (!fits(0)) {
    const auto least = gathered_with(0);
    misfit = describe_misfit(least);
    // No choice helps where the planned window alone is too large; elsewhere one does.
    std::transform(room.begin(), room.end(), least.begin(), room.begin(),
                   [](int64_t has, int64_t needs) { return std::max(has, needs); });
  }
  const int64_t all = std::accumulate(nbytes.begin(), nbytes.end(), int64_t{0});
  const bool all_fit = *std::min_element(room.begin(), room.end()) >= all;
  residency.set_limits({.resident_bytes = all_fit ? -1 : largest(all, fits), .prefetch = prefetch});
  if (misfit.empty() || is_first) return misfit;
  if (!std::exchange(warned_, true)) TORCH_WARN(misfit);
  return "";
}

// Describes the misfit of the rank that lacks most. Collective.
std::string MemoryBudget::describe_misfit(const std::vector<int64_t>& gathered) const {
  int64_t most = -1;
  std::string text;
  for (size_t i = 0; i < gathered.size(); ++i) {
    MemoryBytes bytes = i < at_.size() ? at_[i] : outside_;
    const int64_t needed = gathered[i] + (i < at_.size() ? need(bytes) : held(bytes));
    if (needed <= most) continue;
    most = needed;
    bytes.optimizer_state += needed - gathered[i] - held(bytes);
    text = fmt::format(
        "[memory_budget] even if each unit is gathered only while it is used, rank {} needs {} "
        "bytes, and has {} (plan.memory_budget); most are needed {}: gathered parameters {}, {}. "
        "Use a larger budget, smaller units (plan.unit_bytes), or keep fewer activations "
        "(tessera::checkpoint)",
        state_.mesh().rank(), needed, budget_,
        i < at_.size() ? fmt::format("when {} is used", state_.units()[order_[i]]->label())
                       : "between backward and forward",
        gathered[i], describe(bytes));
  }
  const auto texts = state_.mesh().all_gather_bytes(fmt::format("{}\n{}", most - budget_, text),
                                                    {"budget of memory", Channel::kControl});
  const auto worst = std::max_element(texts.begin(), texts.end(), [](const auto& a, const auto& b) {
    return std::stoll(a) < std::stoll(b);
  });
  return worst->substr(worst->find('\n') + 1);
}

}  // namespace tessera
