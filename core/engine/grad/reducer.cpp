#include "engine/grad/reducer.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <numeric>

#include "base/device/device.h"
#include "engine/grad/backward_ends.h"
#include "engine/grad/capture_watch.h"
#include "engine/grad/grad_gate.h"
#include "engine/unit/lost_step.h"
#include "tensor/redistribute.h"

namespace tessera {

// [Note: One order of reductions]
//
// A unit can be reduced as soon as all its gradients have arrived, but ranks may finish units in
// different orders, or never (a parameter that a rank does not use gets no gradient). So units are
// launched in one order that all ranks share, each only after all units before it. At the end of
// backward the ranks agree on which parameters any rank used (one small all-reduce); each rank then
// launches its remaining units, leaving out those that no rank used. The sequence of launches is
// thus the same on all ranks.
//
// Units may be launched together, in buckets that are fixed runs of that order. The rules for units
// then hold for buckets: a bucket starts early only when all its units are complete, and then all
// of them are used, on all ranks; at the end of backward, it holds those units that the ranks
// agreed on as used.
//
// A parameter can get a gradient again after its unit was launched, if backward itself runs a
// backward (recomputation). Such units are launched once more at the end of backward, each by
// itself.
//
// With a replicate dim, a second reduction follows each first one, in the same order, also where
// the first ones are of several models. A rank starts it as soon as it finds the first one done
// while it launches others, and at the latest when the gradients are needed, or when the ranks of a
// replica are those over which another unit is sharded. On a device it is queued at once, behind
// the first one.
//
// The initial order is the reverse of registration; later it is the order in which units became
// complete. That is not the order of use: the weight of a tied output layer is used first in
// backward, and its gradient is complete last. Units that no backward completes come last, where
// they hold up no other.
namespace {

// Bytes that may be in flight where ranks share memory and units are small, so that ranks need not
// wait for each other at every unit.
constexpr int64_t kLeastSharedBytes = int64_t{16} << 20;

// Returns this rank's part of a DistTensor's gradient. Usually the gradient has its placements
// already: see place_gradients().
at::Tensor local_gradient(const ParamSlot& slot, const at::Tensor& gradient) {
  if (!slot.dist) return gradient;
  const DistMeta& meta = dist_meta("backward", gradient);
  const DistSpec& spec = slot.dist->gradients ? *slot.dist->gradients : *slot.dist->spec;
  return convert(meta.local, *meta.spec, spec.placements, slot.dist->sizes, slot.name());
}

// Ranks shard their models in one order, as that is collective.
int64_t next_number() {
  static std::atomic<int64_t> models = 0;
  return models++;
}

std::string read_error(const ParamSlot& slot) {
  return "[tessera] the gradient of parameter '" + slot.name() +
         "' is reduced and sharded, so .grad() does not hold it. Use "
         "ShardedModule::full_grad(parameter) to see it whole, clip_grad_norm_() of the sharded "
         "module or optimizer to clip, and ShardedOptimizer::step() to apply it";
}

}  // namespace

AllGradients Reducer::make_gradients(const std::vector<Unit*>& units) {
  AllGradients gradients;
  GradientSink* const sink = this;
  for (Unit* unit : units) {
    if (!options_.reduces) {
      gradients.push_back(std::make_shared<GivenGradients>(*unit));
      continue;
    }
    // Units that are each rank's own are not averaged.
    const bool is_own = !unit->layout().is_replicated();
    gradients.push_back(std::make_shared<UnitGradients>(*unit, sink, is_own ? 1 : options_.scale,
                                                        is_own ? 1 : options_.predivide));
  }
  return gradients;
}

Reducer::Reducer(const std::vector<Unit*>& units, const ShardMesh& mesh,
                 const ReducerOptions& options, BackwardListener& listener)
    : mesh_(mesh),
      options_(options),
      listener_(listener),
      gradients_(make_gradients(units)),
      in_flight_(gradients_, mesh.shard().sends_to().empty() ? kLeastSharedBytes : 0,
                 !computes_on_host(units.front()->layout().device)),
      agreement_(gradients_, mesh_, listener),
      backwards_(/*may_overlap=*/mesh.size() == 1),
      number_(next_number()) {
  if (mesh_.replicates()) replicas_ = ReplicaQueue::of(mesh_.replicate());
  std::vector<int> order(units.size());
  std::iota(order.rbegin(), order.rend(), 0);
  set_order(std::move(order));
}

// Calls `f` with each tensor whose gradients are reduced.
template <class F>
void Reducer::for_each_handle(F&& f) const {
  if (!options_.reduces) return;
  for (size_t unit = 0; unit < gradients_.size(); ++unit) {
    const auto& slots = gradients_[unit]->unit().layout().slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      for (size_t i = 0; i < slots[slot].handles.size(); ++i) {
        const at::Tensor tensor = slots[slot].tensor(i);
        if (tensor.defined()) f(unit, slot, i, tensor);
      }
    }
  }
}

void Reducer::install() {
  *told_captures_ = mesh_.size() == 1;
  for (const auto& gradients : gradients_) gradients->begin_backward();
  take_given();
  for_each_handle([&](size_t unit, size_t slot, size_t i, const at::Tensor& tensor) {
    const ParamSlot& param = gradients_[unit]->unit().layout().slots[slot];
    install_grad_gate(tensor, {gradients_[unit], slot, i}, read_error(param));
    watch_captures(tensor, param.name(), told_captures_);
  });
}

void Reducer::uninstall() {
  if (!options_.reduces) return;
  clear_all();
  *told_captures_ = true;
  for_each_handle(
      [](size_t, size_t, size_t, const at::Tensor& tensor) { remove_grad_gate(tensor); });
}

// Takes the gradients that no backward of this model made. They count as of a backward under
// `no_sync()`.
void Reducer::take_given() {
  for_each_handle([&](size_t unit, size_t slot, size_t i, const at::Tensor& tensor) {
    const at::Tensor grad = take_gradient(tensor);
    if (!grad.defined()) return;
    const UnitLayout& layout = gradients_[unit]->unit().layout();
    gradients_[unit]->arrive(slot, i, local_gradient(layout.slots[slot], grad).to(layout.device));
    accumulating_ = true;
  });
}

void Reducer::set_order(std::vector<int> order) {
  order_.set(std::move(order), gradients_, options_.bucket_bytes);
  in_flight_.allow_buckets(order_.largest());
}

void Reducer::take(size_t unit, size_t slot, size_t handle, const at::Tensor& tensor) {
  const at::Tensor grad = take_gradient(tensor);
  if (!grad.defined()) return;  // the user's hook has cleared it
  const std::lock_guard lock(mutex_);
  begin_backward();
  gradients_[unit]->arrive(slot, handle,
                           local_gradient(gradients_[unit]->unit().layout().slots[slot], grad));
  arrivals_.push_back(static_cast<int>(unit));
  if (no_sync_ == 0) launch_ready();
}

std::vector<int> Reducer::completed() const {
  std::vector<int> units = arrivals_;
  std::erase_if(units, [&](int unit) { return !gradients_[unit]->is_complete(); });
  return units;
}

// The callback holds a token; if backward ends by an exception, the token is destroyed without the
// callback having run. A backward inside a backward (recomputation) counts as part of the outer
// one. See OpenBackwards.
void Reducer::begin_backward() {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backwards_.is_latest(backward)) return;
  const bool is_outermost = backwards_.empty(), failed = backwards_.last_failed();
  const auto token = std::make_shared<int>(0);
  if (!backwards_.add(backward, token)) return;
  if (is_outermost) {
    if (Progress* const progress = context().progress) progress->enter(Phase::kBackward);
    if (failed) abandon_backward();
    in_flight_.begin_backward();
    settle_earlier();
    for (const auto& gradients : gradients_) gradients->begin_backward();
    arrivals_.clear();
    context().watch.tell(MemoryEvent::kBackwardBegin);
  }
  const auto ends = BackwardEnds::of_current_run();
  ends->add();
  torch::autograd::Engine::get_default_engine().queue_callback([this, backward, token, ends] {
    ends->end(number_, [this, backward] { end_backward(backward); });
  });
}

// Waits for the reductions that the last backward left in flight, so that another one adds to them.
void Reducer::settle_earlier() {
  if (is_reducing()) listener_.on_settle();
  settle();
}

bool Reducer::is_reducing() const {
  return std::any_of(gradients_.begin(), gradients_.end(),
                     [](const auto& gradients) { return gradients->is_reducing(); });
}

bool Reducer::any_live() const {
  return std::any_of(gradients_.begin(), gradients_.end(),
                     [](const auto& gradients) { return gradients->any_live(); });
}

std::vector<double> Reducer::clears() const {
  std::vector<double> clears;
  for (const auto& gradients : gradients_) {
    for (size_t slot = 0; slot < gradients->unit().layout().slots.size(); ++slot)
      clears.push_back(gradients->clears(slot));
  }
  return clears;
}

void Reducer::forget_clears() {
  for (const auto& gradients : gradients_) gradients->forget_clears();
}

void Reducer::clear_as(const std::vector<double>& others) {
  const std::lock_guard lock(mutex_);
  // They wait for reductions before they tell, but for those that `clear_all()` has ended.
  if (is_reducing()) clear_all();
  auto count = others.begin();
  for (const auto& gradients : gradients_) {
    for (size_t slot = 0; slot < gradients->unit().layout().slots.size(); ++slot, ++count)
      if (*count > gradients->clears(slot)) gradients->clear(slot);
  }
  forget_clears();
}

void Reducer::abandon_backward() {
  if (accumulating_ || any_live()) {
    TORCH_WARN(
        "[tessera] the last backward failed; gradients accumulated before it were dropped, too");
  }
  clear_all();
}

void Reducer::launch_ready() {
  for (; const GradBucket* bucket = order_.next(); order_.pass()) {
    std::vector<size_t> arrived;
    for (const size_t unit : bucket->units) {
      if (!gradients_[unit]->is_complete()) return;
      // A unit without trainable parameters is complete from the start, and is not sent.
      if (gradients_[unit]->any_arrived()) arrived.push_back(unit);
    }
    if (!arrived.empty()) launch(arrived, bucket->name);
  }
}

// Starts the second reductions of all units that were launched, also those of other models, or only
// of those for which it need not wait.
void Reducer::replicate(bool waits) {
  if (!replicas_) return;
  waits = waits || !computes_on_host(gradients_.front()->unit().layout().device);
  // If the channels of a process group share one order, only waiting gives all ranks the same one.
  if (!waits && !mesh_.replicate().has_channels()) return;
  replicas_->start(waits);
}

void Reducer::launch(const std::vector<size_t>& units, const std::string& name) {
  std::vector<UnitGradients*> gradients;
  for (const size_t unit : units) {
    agreement_.launch(unit);
    in_flight_.add(unit);
    gradients.push_back(gradients_[unit].get());
  }
  try {
    ReplicaQueue::start_before_others(gradients.front()->unit().mesh().shard());
    launch_together(gradients, order_.lasting(name));
  } catch (...) {
    rethrow_as_lost(context(), fmt::format("reduce the gradients of unit '{}'", name));
  }
  if (gradients.front()->unit().mesh().replicates())
    replicas_->push(gradients.front()->reduction());
  replicate(/*waits=*/false);
  in_flight_.keep_limit(/*may_wait=*/!listener_.is_uneven());
}

void Reducer::end_backward(int backward) {
  const std::lock_guard lock(mutex_);
  if (!backwards_.end(backward)) return;
  lockstep().end_backward();
  listener_.on_backward_end();
  if (no_sync_ > 0) {
    accumulating_ = true;
    // Other ranks may have to ask for units before their backward is over.
    const bool any_frees = std::any_of(gradients_.begin(), gradients_.end(),
                                       [](const auto& unit) { return unit->unit().frees(); });
    listener_.on_pass_end(false, any_frees ? agreement_.agree_on_vote() : PassVote());
  } else {
    listener_.on_agreement(/*in_backward=*/true);
    listener_.on_pass_end(true, reduce_arrived());
    lockstep().end_pass(context().unchecked_gathers);
  }
  context().watch.tell(MemoryEvent::kBackwardEnd);
  if (Progress* const progress = context().progress) progress->enter(Phase::kUserCode);
  agreement_.check();
}

bool Reducer::reduce_waiting() {
  const std::lock_guard lock(mutex_);
  const PhaseScope phase(context().progress, Phase::kBackward);
  settle_earlier();
  listener_.on_agreement(/*in_backward=*/false);
  reduce_arrived();
  agreement_.check();
  for (size_t unit = 0; unit < gradients_.size(); ++unit)
    if (agreement_.any_used(unit)) return true;
  return false;
}

void Reducer::join_reduction(bool in_backward) {
  const std::lock_guard lock(mutex_);
  const PhaseScope phase(context().progress, Phase::kBackward);
  if (in_backward) {
    for (const auto& gradients : gradients_) gradients->begin_backward();
    arrivals_.clear();
    listener_.on_backward_end();
  }
  const PassVote most = reduce_arrived(/*done=*/true);
  if (in_backward) {
    listener_.on_pass_end(true, most);
    lockstep().end_pass(context().unchecked_gathers);
  }
  agreement_.check();
}

// Starts this rank's remaining reductions. All ranks must call it; `done`: this one has run out of
// data. Returns the highest vote.
PassVote Reducer::reduce_arrived(bool done) {
  take_given();
  const PassVote vote = agreement_.agree(done);
  for (; const GradBucket* bucket = order_.next(); order_.pass()) {
    std::vector<size_t> used;
    for (const size_t unit : bucket->units) {
      if (agreement_.any_used(unit)) used.push_back(unit);
    }
    if (!used.empty()) launch(used, bucket->name);
  }
  launch_late();
  forget_progress();
  return vote;
}

void Reducer::launch_late() {
  for (const int unit : order_.units()) {
    if (!agreement_.is_late(unit)) continue;
    replicate(/*waits=*/true);
    gradients_[unit]->settle(agreement_.used(unit));
    launch({static_cast<size_t>(unit)}, gradients_[unit]->unit().layout().name);
  }
}

void Reducer::settle() {
  const std::lock_guard lock(mutex_);
  replicate(/*waits=*/true);
  // While one gather sends, the next one begins.
  for (const int unit : order_.units()) gradients_[unit]->start_gather();
  for (const int unit : order_.units()) {
    gradients_[unit]->settle(agreement_.used(unit));
    agreement_.forget_used(unit);
  }
}

bool Reducer::any_gradient() {
  if (!options_.reduces) return true;
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(backwards_.empty(),
              "[step] backward must be over; one of this model runs still, in another thread or "
              "around this call (was step() called by a hook?)");
  for_each_handle([&](size_t unit, size_t slot, size_t, const at::Tensor& tensor) {
    TORCH_CHECK(!holds_gradient(tensor), "[step] parameter '",
                gradients_[unit]->unit().layout().slots[slot].name(),
                "' has a gradient that backward did not give it (.grad was set by hand). Call "
                "ShardedModule::reduce() on all ranks first, which reduces it with the others");
  });
  settle();
  const bool any_own = std::any_of(gradients_.begin(), gradients_.end(), [](const auto& unit) {
    return !unit->unit().layout().is_replicated();
  });
  return any_own || any_live();
}

void Reducer::clear_all() {
  const std::lock_guard lock(mutex_);
  for_each_handle([](size_t, size_t, size_t, const at::Tensor& tensor) { take_gradient(tensor); });
  replicate(/*waits=*/true);
  for (const auto& gradients : gradients_) gradients->clear_all();
  for (size_t unit = 0; unit < gradients_.size(); ++unit) agreement_.forget_used(unit);
  forget_progress();
}

void Reducer::zero_all() {
  settle_earlier();  // only then it is known which parameters have gradients
  for (const auto& gradients : gradients_) gradients->zero_all();
  forget_progress();
}

// Resets the progress of a backward that is over, or whose gradients were dropped.
void Reducer::forget_progress() {
  order_.restart();
  agreement_.forget_launches();
  in_flight_.clear();
  accumulating_ = false;
}

}  // namespace tessera
