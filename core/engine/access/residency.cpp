#include "engine/access/residency.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

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
// for. No rank waits for something that never comes: the sequence of a pass, the planned gathers
// and then agreements with the gathers that they decide on, is the same on all ranks, and a rank
// waits at a place of it only until the others come to that place. The rank that is farthest behind
// therefore never waits, and it comes to its end, as its forward and backward wait for nothing
// else.
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

constexpr size_t kListedUses = 32;  // in errors

bool in_backward() { return torch::autograd::get_current_node() != nullptr; }

bool several_ranks(const std::vector<Unit*>& units) {
  return std::ranges::any_of(units, [](const Unit* unit) { return unit->mesh().size() > 1; });
}

// True if units would be freed if the ranks did not share their memory.
bool any_stays_shared(const std::vector<Unit*>& units) {
  return std::ranges::any_of(units, [](const Unit* unit) {
    return unit->layout().level == ShardLevel::kParameters && unit->is_shared();
  });
}

bool in_training() { return at::GradMode::is_enabled() || in_backward(); }

}  // namespace

Residency::Residency(std::vector<Unit*> units, const Limits& limits, Ask ask)
    : units_(std::move(units)),
      limits_(limits),
      next_limits_(limits),
      ask_(std::move(ask)),
      any_frees_(std::ranges::any_of(units_, &Unit::frees)),
      stays_shared_(any_stays_shared(units_)),
      learner_(static_cast<int>(units_.size())),
      ahead_(units_.size(), false) {
  plan();
}

std::vector<int64_t> Residency::freed_nbytes() const {
  std::vector<int64_t> nbytes;
  for (const Unit* unit : units_)  // units without elements are gathered, too
    nbytes.push_back(unit->frees() ? std::max<int64_t>(unit->layout().nbytes(), 1) : 0);
  return nbytes;
}

void Residency::plan() {
  cursor_.set(learner_.order(), freed_nbytes(), limits_.resident_bytes, limits_.prefetch);
}

void Residency::on_use(const std::vector<Unit*>& units, bool writes) {
  const auto guard = lock();
  running_.enter(units, writes && several_ranks(units_), /*frees=*/frees());
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
      names(pass_.trains ? cursor_.uses() : learner_.order().forward),
      names(pass_.trains ? used().joined() : pass_.prelude));
}

void Residency::on_used() noexcept {
  const auto guard = lock();
  running_.leave();
}

void Residency::check_unused(const char* call) const {
  if (!several_ranks(units_)) return;
  const auto guard = lock();
  running_.check_none(call);
}

void Residency::use(const std::vector<Unit*>& units) {
  // Nearly always, it is the unit of the last operator again.
  if (units.size() == 1 && units[0] == last_.unit &&
      last_.unit->state() == Unit::State::kUnsharded && (last_.trained || !in_training()))
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

// The units of one operator arrive in the order of its arguments. This need not be the order of use
// (`addmm` takes the bias first): using them as they arrive would skip the uses in between.
std::vector<Unit*> Residency::in_order(std::vector<Unit*> units) const {
  if (units.size() == 1) return units;
  const UseOrder& uses = cursor_.uses();
  const auto from = uses.begin() + std::max<ptrdiff_t>(cursor_.position(), 0);
  auto next_use = [&](const Unit* unit) { return std::find(from, uses.end(), unit->index()); };
  std::sort(units.begin(), units.end(), [&](const Unit* a, const Unit* b) {
    return std::pair(next_use(a), a->index()) < std::pair(next_use(b), b->index());
  });
  return units;
}

// A use outside of backward counts as forward. Forward lasts until backward begins. The uses of a
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
  last_ = {&unit, trains};
  if (frees()) {
    if (trains && !pass_.trains) begin_pass(unit);
    if (pass_.trains) record(unit);
    const bool expected = !pass_.asks && advance(unit.index());
    if (!pass_.trains) append_use(pass_.prelude, unit.index());
    if (!expected && pass_.trains) leave_order();
    // A unit that is here is freed as planned.
    if (!expected && unit.state() == Unit::State::kSharded) {
      if (pass_.asks) {
        pass_.asked = unit.index();
        ask_(pass_.asked);
        pass_.asked = -1;
      }
      if (unit.frees()) postponed_.push_back(&unit);
    }
  } else if (trains) {
    record(unit);
  } else if (stays_shared_ && !any_frees_ && hold_.count == 0 && used().forward.empty()) {
    learner_.count_evaluation();
  }
  if (unit.state() == Unit::State::kSharded) unit.unshard();
}

void Residency::record(const Unit& unit) {
  if (!in_backward() && used().forward.empty())
    unit.context().watch.tell(MemoryEvent::kForwardBegin);
  learner_.record(unit.index(), in_backward());
}

// True if the forward part of the order goes on with a use of `unit`, or is at one.
bool Residency::is_expected(const Unit& unit) const {
  return cursor_.position() >= 0 && (cursor_.is_at(unit.index()) ||
                                     cursor_.find_ahead(unit.index(), cursor_.forward_end()) >= 0);
}

// Called at the first use with gradients.
void Residency::begin_pass(const Unit& unit) {
  if (pass_.is_told || !is_expected(unit)) finish_evaluation();
  pass_.trains = true;
  for (const int used : std::exchange(pass_.prelude, {})) record(*units_[used]);
}

// Between passes: executes the rest of the evaluation's plan, as all ranks do.
void Residency::finish_evaluation() {
  pass_.prelude.clear();
  if (!std::exchange(pass_.is_told, false) && cursor_.position() < 0) return;
  execute(cursor_.forward_end());
  cursor_.restart();
  if (limits_.resident_bytes >= 0) free_all();
}

void Residency::begin_forward() {
  const auto guard = lock();
  free_released();
  if (pass_.trains || !frees()) return;
  finish_evaluation();
  pass_.trains = at::GradMode::is_enabled();
  pass_.is_told = !pass_.trains;
}

void Residency::end_evaluation() {
  const auto guard = lock();
  if (!pass_.trains && frees()) finish_evaluation();
}

// How far uses may move the cursor: without gradients, not into backward. Registration order is a
// guess: until an order is learned, a forward that returns to a unit is not in backward yet,
// either.
ptrdiff_t Residency::reach() const {
  const bool is_forward = !in_training() || (!learner_.has_learned() && !in_backward());
  return is_forward ? cursor_.forward_end() : cursor_.end();
}

// Moves to the next use of `unit` in the order and executes the plan up to it. False if there is
// none.
bool Residency::advance(int unit) {
  if (cursor_.is_at(unit)) return true;
  ptrdiff_t target = cursor_.find_ahead(unit, reach());
  if (target < 0 && !pass_.trains) {
    // The next evaluation begins: end the current one, then look again.
    finish_evaluation();
    free_all();
    target = cursor_.find_ahead(unit, reach());
  }
  if (target < 0) return false;
  execute(target + 1);
  return true;
}

// The pass goes on with a use that the order does not expect.
void Residency::leave_order() {
  learner_.leave_order();
  if (ask_ && !std::exchange(pass_.asks, true)) execute(cursor_.end());
}

void Residency::serve(const std::vector<int>& units) {
  const auto guard = lock();
  for (const int index : units) {
    Unit& unit = *units_[index];
    const bool is_needed = unit.state() != Unit::State::kSharded || index == pass_.asked;
    unit.unshard();
    if (!is_needed && unit.frees()) unit.reshard();
  }
}

// Executes the plan up to `end`, as all ranks do.
void Residency::execute(ptrdiff_t end) {
  cursor_.advance(end, [this](const ResidencyStep& step) {
    for (const int unit : step.free) free(*units_[unit]);
    for (const int unit : step.gather) gather(*units_[unit]);
  });
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
  cursor_.restart();
  pass_ = {};
  last_ = {};
  postponed_.clear();
  std::fill(ahead_.begin(), ahead_.end(), false);
}

void Residency::end_pass() {
  const auto guard = lock();
  learner_.end_pass();
  if (!frees()) return;
  free_released();
  if (!pass_.trains) finish_evaluation();
  execute(cursor_.end());
  restart();
  if (limits_.resident_bytes >= 0) {
    free_all();
  } else {
    // All units stay until the step; the next pass need not gather them again.
    for (const int unit : cursor_.uses()) ahead_[unit] = true;
  }
}

bool Residency::wants_to_learn() const {
  const auto guard = lock();
  return learner_.wants_to_learn();
}

void Residency::forget_pass() {
  const auto guard = lock();
  learner_.forget_pass();
  last_ = {};  // the next use begins a pass, even if it is of the same unit
}

void Residency::learn(std::vector<PassOrder> ranks) {
  std::vector<int> trainable;
  for (const Unit* unit : units_)
    if (unit->layout().slots.front().requires_grad) trainable.push_back(unit->index());
  learner_.learn(std::move(ranks), trainable);
  plan();
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
  for (const int index : cursor_.uses()) {
    Unit& unit = *units_[index];
    if (done[index] || !((unit.frees() && hold_.count > 0) || is_stale(unit))) continue;
    done[index] = true;
    unit.reshard();
    unit.unshard();
  }
  for (Unit* unit : units_) {
    if (done[unit->index()]) continue;
    if (unit->frees() && hold_.count > 0) unit->unshard();
    // Not in the order, so no rank is known to use it: gathered if it is used after all.
    if (is_stale(*unit)) unit->reshard();
  }
  if (hold_.count > 0 || cursor_.end() == 0) return;
  for (const int index : cursor_.first_gathers()) {
    units_[index]->unshard();
    ahead_[index] = true;
  }
}

void Residency::free_and_restart() {
  hold_.is_released = false;
  pass_.trains ? execute(cursor_.end()) : finish_evaluation();
  free_all();
  restart();
}

void Residency::free_everything() {
  const auto guard = lock();
  if (hold_.count == 0) free_and_restart();
}

void Residency::hold_all() {
  const auto guard = lock();
  free_everything();
  if (hold_.count++ > 0) return;
  for (Unit* unit : units_) {
    if (unit->state() == Unit::State::kSharded) unit->unshard();
  }
  for (Unit* unit : units_) unit->wait();
}

// Called while an exception unwinds the stack, maybe because another rank has ended: does not wait
// for a gather that is under way.
void Residency::release_all() noexcept {
  const auto guard = lock();
  if (--hold_.count > 0) return;
  hold_.is_released = true;
  last_ = {};
  try {
    for (Unit* unit : units_) {
      const bool is_free = unit->state() == Unit::State::kUnsharded && !running_.uses(unit);
      if (unit->frees() && is_free) unit->reshard();
    }
  } catch (const std::exception&) {  // the next use reports it
  }
}

void Residency::free_released() {
  if (hold_.is_released) free_everything();
}

}  // namespace tessera
