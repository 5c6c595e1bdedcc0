#include "engine/access/running_operators.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace tessera {

// [Note: Several threads]
//
// A model may be used by several threads, one after another: forward on one, backward on another.
// Where units are freed between uses, threads must not use the model at the same time: the order in
// which they would gather and free units would differ between ranks, and one thread would free a
// unit that the other's operator reads. So an operator that finds one of another thread running is
// an error there, unless all units that it needs are in use anyway.
//
// Otherwise the rules are those of plain LibTorch. Where units are not freed (lower levels, a
// single rank, memory that the ranks of a host share, `keep_unsharded()`), threads may use them at
// the same time; with several ranks, however, a thread may not read a unit that another one writes.
// Autograd's own threads work for one backward, each on its device, and count as one user.

bool RunningOperators::Use::has(const Unit* unit) const {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

bool RunningOperators::uses(const Unit* unit) const {
  return std::any_of(uses_.begin(), uses_.end(), [&](const Use& use) { return use.has(unit); });
}

bool RunningOperators::goes_with(const Use& mine, const Use& other, bool frees) const {
  if (mine.thread == other.thread) return true;
  if (mine.backward >= 0 && mine.backward == other.backward) return true;
  const bool writes = mine.writes || other.writes;
  const auto& units = mine.units;
  if (frees && (writes || !std::all_of(units.begin(), units.end(),
                                       [&](const Unit* unit) { return uses(unit); })))
    return false;
  return !writes || std::none_of(units.begin(), units.end(),
                                 [&](const Unit* unit) { return other.has(unit); });
}

void RunningOperators::enter(const std::vector<Unit*>& units, bool writes, bool frees) {
  Use mine{.thread = std::this_thread::get_id(),
           .backward = torch::autograd::get_current_graph_task_id(),
           .writes = writes,
           .units = {units.begin(), units.end()}};
  for (const Use& other : uses_) {
    TORCH_CHECK(
        goes_with(mine, other, frees),
        "[tessera] two threads use one sharded model at the same time: an operator of this thread ",
        writes ? "writes to " : "needs ", units.front()->label(), " while one of another thread ",
        other.writes ? "writes to " : "reads ", other.units.front()->label(),
        ". Let one end before the other begins; where several only read parameters, hold "
        "ShardedModule::keep_unsharded() meanwhile");
  }
  uses_.push_back(std::move(mine));
}

void RunningOperators::leave() {
  const auto thread = std::this_thread::get_id();
  const auto last = std::find_if(uses_.rbegin(), uses_.rend(),
                                 [&](const Use& use) { return use.thread == thread; });
  if (last != uses_.rend()) uses_.erase(std::next(last).base());
}

void RunningOperators::check_none(const char* call) const {
  const auto thread = std::this_thread::get_id();
  for (const Use& use : uses_) {
    TORCH_CHECK(use.thread == thread, "[", call,
                "] the model must not be in use by another thread; an operator there ",
                use.writes ? "writes to " : "reads ", use.units.front()->label());
  }
}

}  // namespace tessera
