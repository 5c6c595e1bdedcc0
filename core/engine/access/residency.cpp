#include "engine/access/residency.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <bit>

#include "comm/group/differing_order.h"
#include "comm/group/progress.h"

namespace tessera {

// [Note: One order of gathers]
//
// A gather needs all ranks. Ranks may differ in which units they use (a branch taken by some, a
// batch without images), and then on-demand gathers would wait for each other forever. So all ranks
// follow one order of use: at first registration order and its reverse, and after the first pass
// the merge of the orders that the ranks recorded (OrderHistory). A plan is derived from the order
// (plan_residency): which units to free and which to gather when use reaches each position. A rank
// that uses a unit executes the plan up to the next position of that unit, and executes the rest at
// the end of backward: every rank runs the plan's sequence of gathers, whichever units it used.
//
// A rank that uses a unit which the order does not expect, or not any more, asks for it: it first
// executes the rest of the plan, and then takes part in the agreement in which the other ranks end
// their backwards (Reducer::ask). A vote says that it is not at its own end, and all ranks gather
// the unit and agree again, until no rank asks. All further uses of the pass on this rank are asked
// for. No rank waits in vain: the sequence of a pass, the planned gathers and then agreements with
// the gathers that they decide on, is the same on all ranks, and a rank waits at a place of it only
// until the others come to that place. The rank that is farthest behind therefore never waits, and
// it comes to its end, as its forward and backward wait for nothing else.
//
// Outside of passes, and where the user reduces gradients, there is no such agreement: a use that
// the order does not expect is served by a gather on demand, and all ranks must have that use.
//
// A pass ends with its backward. Grad mode alone does not tell which uses belong to a pass: layers
// read their weights under no_grad (norms, statistics, functions with a backward of their own), and
// frozen parts run under it. So in a pass, all uses belong to it, also those of an evaluation
// between forward and backward. Between passes, uses without gradients follow the forward part of
// the order. A forward of the handle, or a use whose position lies behind, begins an evaluation:
// the rest of the current one is executed first, as on all ranks. A forward of the handle with
// gradients begins a pass, and so does the first use with gradients. If the position of that use
// lies ahead, and no forward of the handle began the evaluation, the uses so far were the beginning
// of that pass, and nothing is gathered again; if not, the evaluation ends here. So without the
// handle, ranks whose passes begin with uses without gradients, or directly follow an evaluation,
// must begin with the same ones. A pass whose forward throws ends before the next change of
// parameters, with the rest of its plan; a rank that has used nothing by then knows of the pass
// through the handle only.
namespace {

constexpr size_t kLongestRecord = 100'000;  // evaluation in grad mode, without a backward
constexpr size_t kListedUses = 32;          // in errors

bool in_backward() { return torch::autograd::get_current_node() != nullptr; }

bool in_training() { return at::GradMode::is_enabled() || in_backward(); }

}  // namespace

Residency::Residency(std::vector<Unit*> units, const Limits& limits, Ask ask)
    : units_(std::move(units)),
      limits_(limits),
      next_limits_(limits),
      ask_(std::move(ask)),
      ahead_(units_.size(), false) {
  for (const Unit* unit : units_) {
    any_frees_ |= unit->frees();
    stays_shared_ |= unit->layout().level == ShardLevel::kParameters && unit->is_shared();
    several_ranks_ |= unit->context().mesh.size() > 1;
  }
  order_ = registration_order(static_cast<int>(units_.size()));
  plan();
}

std::vector<int64_t> Residency::freed_nbytes() const {
  std::vector<int64_t> nbytes;
  for (const Unit* unit : units_)  // units without elements are gathered, too
    nbytes.push_back(unit->frees() ? std::max<int64_t>(unit->layout().nbytes(), 1) : 0);
  return nbytes;
}

void Residency::plan() {
  joined_ = order_.joined();
  steps_ = plan_residency(joined_, freed_nbytes(), limits_.resident_bytes, limits_.prefetch);
  position_ = -1;
}

void Residency::on_use(const std::vector<Unit*>& units, bool writes) {
  const auto guard = lock();
  running_.enter(units, writes && several_ranks_, /*frees=*/any_frees_ && held_ == 0);
  try {
    use(units);
  } catch (c10::DistBackendError& error) {
    running_.leave();
    if (tells_differing_order(error.what_without_backtrace())) error.add_context(orders_text());
    throw;
  } catch (...) {
    running_.leave();
    throw;
  }
}

// At once, as ranks may differ in whether they use the unit again; unless it is freed now.
void Residency::on_written(Unit& unit) {
  if (std::ranges::find(postponed_, &unit) == postponed_.end()) unit.unshard();
}

std::string Residency::orders_text() const {
  const auto names = [&](const UseOrder& order) {
    std::vector<std::string> listed;
    for (size_t i = 0; i < std::min(order.size(), kListedUses); ++i)
      listed.push_back(units_[order[i]]->layout().name);
    if (listed.size() < order.size()) listed.emplace_back("...");
    if (listed.empty()) return std::string("none yet");
    return fmt::format("{}", fmt::join(listed, ", "));
  };
  return fmt::format(
      "[tessera] all ranks must gather units in the order of use that they share: {}; this rank "
      "has used {}. In training, they may use units in any order, unless the user reduces "
      "gradients. Elsewhere, as in an evaluation, they may only leave units out",
      names(trains_ ? order_.joined() : order_.forward),
      names(trains_ ? used_.joined() : prelude_));
}

void Residency::on_used() noexcept {
  const auto guard = lock();
  running_.leave();
}

void Residency::check_unused(const char* call) const {
  if (!several_ranks_) return;
  const auto guard = lock();
  running_.check_none(call);
}

void Residency::use(const std::vector<Unit*>& units) {
  // Nearly always, it is the unit of the last operator again.
  if (units.size() == 1 && units[0] == last_ && last_->state() == Unit::State::kUnsharded &&
      (last_trained_ || !in_training()))
    return;
  const MemoryWatch& watch = units_.front()->context().watch;
  watch.before_change();
  free_released();
  const std::vector<Unit*> in_use = in_order(units);
  for (Unit* unit : std::exchange(postponed_, {})) free(*unit);
  for (Unit* unit : in_use) use_one(*unit);
  for (Unit* unit : in_use) unit->wait();
  for (const Unit* unit : in_use) watch.tell(MemoryEvent::kUnitUsed, unit->layout().name);
}

// The units of one operator arrive in the order of its arguments, which need not be the order of
// use (`addmm` takes the bias first): using them as they arrive would skip the uses in between.
std::vector<Unit*> Residency::in_order(std::vector<Unit*> units) const {
  if (units.size() == 1) return units;
  const auto from = joined_.begin() + std::max<ptrdiff_t>(position_, 0);
  auto next_use = [&](const Unit* unit) { return std::find(from, joined_.end(), unit->index()); };
  std::sort(units.begin(), units.end(), [&](const Unit* a, const Unit* b) {
    return std::pair(next_use(a), a->index()) < std::pair(next_use(b), b->index());
  });
  return units;
}

// A use outside of backward counts as forward, which lasts until backward begins. The uses of a
// step, a save or a load belong to it.
void Residency::show_phase() const {
  Progress* const progress = units_.front()->context().progress;
  if (!progress) return;
  const Phase now = progress->state().phase;
  if (now == Phase::kUserCode || now == Phase::kForward || now == Phase::kBackward)
    progress->enter(in_backward() ? Phase::kBackward : Phase::kForward);
}

void Residency::use_one(Unit& unit) {
  show_phase();
  const bool trains = in_training();
  last_ = &unit;
  last_trained_ = trains;
  if (held_ == 0 && any_frees_) {
    if (trains && !trains_) begin_pass(unit);
    if (trains_) record(unit);
    const bool expected = !asks_ && advance(unit.index());
    if (!trains_) append_use(prelude_, unit.index());
    if (!expected && trains_) leave_order();
    // A unit that is here is freed as planned.
    if (!expected && unit.state() == Unit::State::kSharded) {
      if (asks_) {
        asked_ = unit.index();
        ask_(asked_);
        asked_ = -1;
      }
      if (unit.frees()) postponed_.push_back(&unit);
    }
  } else if (trains) {
    record(unit);
  } else if (stays_shared_ && !any_frees_ && held_ == 0 && used_.forward.empty()) {
    ++uses_in_evaluation_;
  }
  if (unit.state() == Unit::State::kSharded) unit.unshard();
}

void Residency::record(const Unit& unit) {
  if (!in_backward()) {
    if (used_.forward.empty()) unit.context().watch.tell(MemoryEvent::kForwardBegin);
    append_use(used_.forward, unit.index());
    if (used_.forward.size() > kLongestRecord) forget_pass(), deviated_ = true;
    return;
  }
  // Backward begins with the unit that forward ended with; as that was the last unit used, its use
  // in backward was not seen.
  if (used_.backward.empty() && !used_.forward.empty())
    append_use(used_.backward, used_.forward.back());
  append_use(used_.backward, unit.index());
}

// True if the forward part of the order goes on with a use of `unit`, or is at one.
bool Residency::is_expected(const Unit& unit) const {
  return position_ >= 0 &&
         (joined_[position_] == unit.index() || find_ahead(unit.index(), forward_end()) >= 0);
}

// Called at the first use with gradients.
void Residency::begin_pass(const Unit& unit) {
  if (is_told_ || !is_expected(unit)) finish_evaluation();
  trains_ = true;
  for (const int used : std::exchange(prelude_, {})) record(*units_[used]);
}

// Between passes: executes the rest of the evaluation's plan, as all ranks do.
void Residency::finish_evaluation() {
  prelude_.clear();
  if (!std::exchange(is_told_, false) && position_ < 0) return;
  execute(position_ + 1, forward_end());
  position_ = -1;
  if (limits_.resident_bytes >= 0) free_all();
}

void Residency::begin_forward() {
  const auto guard = lock();
  free_released();
  if (trains_ || held_ > 0 || !any_frees_) return;
  finish_evaluation();
  trains_ = at::GradMode::is_enabled();
  is_told_ = !trains_;
}

void Residency::end_evaluation() {
  const auto guard = lock();
  if (trains_ || held_ > 0 || !any_frees_) return;
  finish_evaluation();
}

// How far uses may move the cursor: without gradients, not into backward. Registration order is a
// guess: until an order is learned, a forward that returns to a unit is not in backward yet,
// either.
ptrdiff_t Residency::reach() const {
  const bool is_forward = !in_training() || (!learned_ && !in_backward());
  return is_forward ? forward_end() : std::ssize(joined_);
}

// The position of the next use of `unit` before `end`, or -1.
ptrdiff_t Residency::find_ahead(int unit, ptrdiff_t end) const {
  const auto begin = joined_.begin();
  const auto next = std::find(begin + std::min(position_ + 1, end), begin + end, unit);
  return next == begin + end ? -1 : next - begin;
}

// Moves to the next use of `unit` in the order and executes the plan up to it. False if there is
// none.
bool Residency::advance(int unit) {
  if (position_ >= 0 && joined_[position_] == unit) return true;
  ptrdiff_t target = find_ahead(unit, reach());
  if (target < 0 && !trains_) {
    // The next evaluation begins: end the current one, then look again.
    finish_evaluation();
    free_all();
    target = find_ahead(unit, reach());
  }
  if (target < 0) return false;
  execute(position_ + 1, target + 1);
  position_ = target;
  return true;
}

// The pass goes on with a use that the order does not expect.
void Residency::leave_order() {
  deviated_ = true;
  if (!ask_ || std::exchange(asks_, true)) return;
  finish();
}

void Residency::serve(const std::vector<int>& units) {
  const auto guard = lock();
  for (const int index : units) {
    Unit& unit = *units_[index];
    const bool is_needed = unit.state() != Unit::State::kSharded || index == asked_;
    unit.unshard();
    if (!is_needed && unit.frees()) unit.reshard();
  }
}

void Residency::execute(ptrdiff_t from, ptrdiff_t to) {
  for (ptrdiff_t p = from; p < to; ++p) {
    for (const int unit : steps_[p].free) free(*units_[unit]);
    for (const int unit : steps_[p].gather) gather(*units_[unit]);
  }
}

// Executes the rest of the pass's plan, as all ranks do.
void Residency::finish() {
  execute(position_ + 1, std::ssize(joined_));
  position_ = std::ssize(joined_) - 1;
}

// A planned gather always runs, even if the unit is gathered here already: other ranks count on it.
void Residency::gather(Unit& unit) {
  std::erase(postponed_, &unit);
  if (ahead_[unit.index()]) {
    ahead_[unit.index()] = false;
  } else {
    unit.unshard();
  }
}

void Residency::free(Unit& unit) {
  if (running_.uses(&unit)) {
    postponed_.push_back(&unit);
  } else {
    unit.reshard();
  }
}

void Residency::free_all() {
  for (Unit* unit : units_) {
    if (unit->frees() && unit->state() != Unit::State::kSharded) free(*unit);
  }
}

void Residency::restart() {
  position_ = -1;
  trains_ = asks_ = is_told_ = false;
  prelude_.clear();
  last_ = nullptr;
  postponed_.clear();
  std::fill(ahead_.begin(), ahead_.end(), false);
}

void Residency::end_pass() {
  const auto guard = lock();
  if (is_sparse()) ++sparse_passes_;
  if (held_ > 0 || !any_frees_) return;
  free_released();
  if (!trains_) finish_evaluation();
  finish();
  restart();
  if (limits_.resident_bytes >= 0) {
    free_all();
  } else {
    // All units stay until the step; the next pass need not gather them again.
    for (const int unit : joined_) ahead_[unit] = true;
  }
}

bool Residency::wants_to_learn() const {
  const auto guard = lock();
  if (!learned_) return true;
  // A second backward of the same forward says nothing about the next pass.
  if (used_.forward.empty()) return false;
  // Where ranks always use parts of the order, learning again is of no use: ever more rarely.
  return deviated_ || (is_sparse() && std::has_single_bit(sparse_passes_));
}

// True if there were far fewer uses than expected: the order may have been learned in an unusual
// pass.
bool Residency::is_sparse() const {
  const size_t uses = used_.forward.size() + used_.backward.size();
  return 4 * uses < 3 * joined_.size() && used_ != mine_;
}

void Residency::forget_pass() {
  const auto guard = lock();
  used_ = {};
  uses_in_evaluation_ = 0;
  last_ = nullptr;  // the next use begins a pass, even if it is of the same unit
}

void Residency::learn(std::vector<PassOrder> ranks) {
  history_.add(std::move(ranks));
  const PassOrder known = std::exchange(order_, history_.merged(order_));
  mine_ = used_;
  std::vector<int> trainable;
  for (const Unit* unit : units_)
    if (unit->layout().slots.front().requires_grad) trainable.push_back(unit->index());
  insert_missing(order_, trainable, known.forward);
  plan();
  learned_ = true;
  deviated_ = false;
}

void Residency::on_step(const std::vector<bool>& changed) {
  const auto guard = lock();
  free_and_restart();
  if (std::exchange(limits_, next_limits_) != next_limits_) plan();
  // Units that are never freed are gathered now, in order of use, while the next forward begins; of
  // the others, only the first ones.
  std::vector<bool> done(units_.size(), false);
  const auto is_stale = [&](const Unit& unit) {
    return !unit.frees() && changed[unit.index()] && unit.layout().level != ShardLevel::kNone;
  };
  for (const int index : joined_) {
    Unit& unit = *units_[index];
    if (done[index] || !((unit.frees() && held_ > 0) || is_stale(unit))) continue;
    done[index] = true;
    unit.reshard();
    unit.unshard();
  }
  for (Unit* unit : units_) {
    if (done[unit->index()]) continue;
    if (unit->frees() && held_ > 0) unit->unshard();
    // Not in the order, so no rank is known to use it: gathered if it is used after all.
    if (is_stale(*unit)) unit->reshard();
  }
  if (held_ > 0 || steps_.empty()) return;
  for (const int index : steps_.front().gather) {
    units_[index]->unshard();
    ahead_[index] = true;
  }
}

void Residency::free_and_restart() {
  released_ = false;
  trains_ ? finish() : finish_evaluation();
  free_all();
  restart();
}

void Residency::free_everything() {
  const auto guard = lock();
  if (held_ == 0) free_and_restart();
}

void Residency::hold_all() {
  const auto guard = lock();
  free_everything();
  if (held_++ > 0) return;
  for (Unit* unit : units_) {
    if (unit->state() == Unit::State::kSharded) unit->unshard();
  }
  for (Unit* unit : units_) unit->wait();
}

// Called while an exception unwinds the stack, maybe because another rank is gone: does not wait
// for a gather that is under way.
void Residency::release_all() noexcept {
  const auto guard = lock();
  if (--held_ > 0) return;
  released_ = true;
  last_ = nullptr;
  try {
    for (Unit* unit : units_) {
      const bool is_free = unit->state() == Unit::State::kUnsharded && !running_.uses(unit);
      if (unit->frees() && is_free) unit->reshard();
    }
  } catch (const std::exception&) {  // the next use reports it
  }
}

void Residency::free_released() {
  if (released_) free_everything();
}

}  // namespace tessera
