#include "engine/grad/reducer.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "base/device/device.h"
#include "engine/grad/backward_ends.h"
#include "engine/grad/capture_watch.h"
#include "engine/grad/grad_gate.h"
#include "engine/grad/longest_pause.h"
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
// while it launches others, and at the latest when the gradients are needed. On a device it is
// queued at once, behind the first one.
//
// The initial order is the reverse of registration; later it is the order in which units became
// complete. That is not the order of use: the weight of a tied output layer is used first in
// backward, and its gradient is complete last. Units that no backward completes come last, where
// they hold up no other.
namespace {

// As kLongestPause, on a device. Its stream does not wait in the host's place, as that would be a
// condition; the pause is longer there, because kernels of a unit may take long, until one was in
// vain: then the ranks use different units, and so they may again.
constexpr auto kLongestDevicePause = std::chrono::milliseconds(500);
constexpr auto kShortDevicePause = std::chrono::milliseconds(1);
constexpr int kShortBackwards = 64;
constexpr auto kPollInterval = std::chrono::microseconds(100);
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

bool is_used(const std::vector<bool>& slots) {
  return std::find(slots.begin(), slots.end(), true) != slots.end();
}

std::string read_error(const ParamSlot& slot) {
  return "[tessera] the gradient of parameter '" + slot.name() +
         "' is reduced and sharded, so .grad() does not hold it. Use "
         "ShardedModule::full_grad(parameter) to see it whole, clip_grad_norm_() of the sharded "
         "module or optimizer to clip, and ShardedOptimizer::step() to apply it";
}

}  // namespace

Reducer::Reducer(std::vector<Unit*> units, const ShardMesh& mesh, const ReducerOptions& options,
                 BackwardListener& listener)
    : units_(std::move(units)),
      mesh_(mesh),
      options_(options),
      listener_(listener),
      progress_(units_.front()->context().progress),
      launched_(units_.size(), false),
      late_(units_.size(), false),
      in_flight_limit_(mesh.shard().sends_to().empty() ? kLeastSharedBytes : 0),
      on_device_(!is_host(units_.front()->layout().device)),
      backwards_(/*may_overlap=*/mesh.size() == 1),
      number_(next_number()) {
  if (mesh_.replicates()) replicas_ = ReplicaQueue::of(mesh_.replicate());
  for (Unit* unit : units_) {
    // Units that are each rank's own are not averaged.
    const bool is_own = !unit->layout().is_replicated;
    has_own_ = has_own_ || is_own;
    frees_ = frees_ || unit->frees();
    const auto take = [this, index = gradients_.size()](size_t slot, size_t handle,
                                                        const at::Tensor& tensor) {
      on_grad(index, slot, handle, tensor);
    };
    gradients_.push_back(
        options.reduces ? std::make_shared<UnitGradients>(*unit, take, is_own ? 1 : options.scale,
                                                          is_own ? 1 : options.predivide)
                        : std::make_shared<GivenGradients>(*unit));
    used_.emplace_back(unit->layout().slots.size(), false);
  }
  std::vector<int> order(units_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  set_order(std::move(order));
}

// Calls `f` with each tensor whose gradients are reduced.
template <class F>
void Reducer::for_each_handle(F&& f) const {
  if (!options_.reduces) return;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const auto& slots = units_[unit]->layout().slots;
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
    const ParamSlot& param = units_[unit]->layout().slots[slot];
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
    const UnitLayout& layout = units_[unit]->layout();
    gradients_[unit]->arrive(slot, i, local_gradient(layout.slots[slot], grad).to(layout.device));
    accumulating_ = true;
  });
}

// Called on all ranks, which agree on the outcome, when the rest of the backward is done.
void Reducer::check_agreed() {
  // Gathers that are queued may wait for other ranks without end.
  if (lockstep_.has_lost_gathers()) leave(units_.front()->context(), lockstep_.error());
  lockstep_.check();
  TORCH_CHECK(lost_gate_.empty(), "[tessera] autograd's metadata of parameter ", lost_gate_,
              " was replaced after the model was sharded, and with it the hook that reduces its "
              "gradient. Set hooks with Tensor::register_hook() or "
              "torch::autograd::impl::set_post_acc_grad_hooks(), which keep it");
}

void Reducer::set_order(std::vector<int> order) {
  order_ = std::move(order);
  std::vector<const UnitLayout*> layouts;
  for (const Unit* unit : units_) layouts.push_back(&unit->layout());
  buckets_ = cut_buckets(layouts, order_, options_.bucket_bytes);
  for (const GradBucket& bucket : buckets_) {
    int64_t nbytes = 0;
    for (const size_t unit : bucket.units) nbytes += units_[unit]->layout().nbytes();
    in_flight_limit_ = std::max(in_flight_limit_, 2 * nbytes);
  }
}

void Reducer::on_grad(size_t unit, size_t slot, size_t handle, const at::Tensor& tensor) {
  const at::Tensor grad = take_gradient(tensor);
  if (!grad.defined()) return;  // the user's hook has cleared it
  const std::lock_guard lock(mutex_);
  begin_backward();
  gradients_[unit]->arrive(slot, handle, local_gradient(units_[unit]->layout().slots[slot], grad));
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
  const bool is_outermost = backwards_.empty();
  const auto token = std::make_shared<int>(0);
  if (!backwards_.add(backward, token)) return;
  if (is_outermost) {
    if (progress_) progress_->enter(Phase::kBackward);
    if (in_backward_) abandon_backward();
    if (short_backwards_ > 0) --short_backwards_;
    settle_earlier();
    for (const auto& gradients : gradients_) gradients->begin_backward();
    arrivals_.clear();
    in_backward_ = true;
    units_.front()->context().watch.tell(MemoryEvent::kBackwardBegin);
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
  for (; next_ < buckets_.size(); ++next_) {
    const GradBucket& bucket = buckets_[next_];
    std::vector<size_t> arrived;
    for (const size_t unit : bucket.units) {
      if (!gradients_[unit]->is_complete()) return;
      // A unit without trainable parameters is complete from the start, and is not sent.
      if (gradients_[unit]->any_arrived()) arrived.push_back(unit);
    }
    if (!arrived.empty()) launch(arrived, bucket.name);
  }
}

// Starts the second reductions of all units that were launched, also those of other models, or only
// of those for which it need not wait.
void Reducer::replicate(bool waits) {
  if (!replicas_) return;
  waits = waits || on_device_;
  // If the channels of a process group share one order, only waiting gives all ranks the same one.
  if (!waits && !mesh_.replicate().has_channels()) return;
  replicas_->start(waits);
}

void Reducer::launch(const std::vector<size_t>& units, const std::string& name) {
  std::vector<UnitGradients*> gradients;
  for (const size_t unit : units) {
    for (size_t slot = 0; slot < used_[unit].size(); ++slot) {
      if (gradients_[unit]->has_arrived(slot)) used_[unit][slot] = true;
    }
    launched_[unit] = true;
    in_flight_.push_back(unit);
    in_flight_bytes_ += units_[unit]->layout().nbytes();
    gradients.push_back(gradients_[unit].get());
  }
  try {
    launch_together(gradients, *names_.insert(name).first);
  } catch (...) {
    rethrow_as_lost(units_.front()->context(),
                    fmt::format("reduce the gradients of unit '{}'", name));
  }
  if (units_[units.front()]->context().mesh.replicates())
    replicas_->push(gradients.front()->reduction());
  replicate(/*waits=*/false);
  peak_in_flight_bytes_ = std::max(peak_in_flight_bytes_, in_flight_bytes_);
  limit_in_flight();
}

void Reducer::limit_in_flight() {
  auto pause = kLongestPause;
  if (on_device_) pause = short_backwards_ > 0 ? kShortDevicePause : kLongestDevicePause;
  if (listener_.is_uneven()) pause = {};
  const auto deadline = std::chrono::steady_clock::now() + pause;
  while (!in_flight_.empty()) {
    const size_t oldest = in_flight_.front();
    const bool is_over = in_flight_bytes_ > in_flight_limit_;
    if (gradients_[oldest]->is_reduced()) {
      if (on_device_) gradients_[oldest]->wait_on_stream();  // which frees what it has sent
      in_flight_bytes_ -= units_[oldest]->layout().nbytes();
      in_flight_.erase(in_flight_.begin());
    } else if (is_over && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(kPollInterval);
    } else {
      if (is_over && short_backwards_ == 0) short_backwards_ = kShortBackwards;
      return;
    }
  }
}

void Reducer::end_backward(int backward) {
  const std::lock_guard lock(mutex_);
  if (!backwards_.end(backward)) return;
  in_backward_ = false;
  lockstep_.end_backward();
  listener_.on_backward_end();
  if (no_sync_ > 0) {
    accumulating_ = true;
    // Other ranks may have to ask for units before their backward is over.
    listener_.on_pass_end(false, frees_ ? agree_on_vote() : PassVote());
  } else {
    listener_.on_agreement(/*in_backward=*/true);
    listener_.on_pass_end(true, reduce_arrived());
    lockstep_.end_pass(units_.front()->context().unchecked_gathers);
  }
  units_.front()->context().watch.tell(MemoryEvent::kBackwardEnd);
  if (progress_) progress_->enter(Phase::kUserCode);
  check_agreed();
}

bool Reducer::reduce_waiting() {
  const std::lock_guard lock(mutex_);
  const PhaseScope phase(progress_, Phase::kBackward);
  settle_earlier();
  listener_.on_agreement(/*in_backward=*/false);
  reduce_arrived();
  check_agreed();
  return std::any_of(used_.begin(), used_.end(), is_used);
}

void Reducer::join_reduction(bool in_backward) {
  const std::lock_guard lock(mutex_);
  const PhaseScope phase(progress_, Phase::kBackward);
  if (in_backward) {
    for (const auto& gradients : gradients_) gradients->begin_backward();
    arrivals_.clear();
    listener_.on_backward_end();
  }
  const PassVote most = reduce_arrived(/*done=*/true);
  if (in_backward) {
    listener_.on_pass_end(true, most);
    lockstep_.end_pass(units_.front()->context().unchecked_gathers);
  }
  check_agreed();
}

// Starts this rank's remaining reductions. All ranks must call it; `done`: this one has run out of
// data. Returns the highest vote.
PassVote Reducer::reduce_arrived(bool done) {
  take_given();
  const PassVote vote = agree_on_use(done);
  for (; next_ < buckets_.size(); ++next_) {
    std::vector<size_t> used;
    for (const size_t unit : buckets_[next_].units) {
      if (is_used(used_[unit])) used.push_back(unit);
    }
    if (!used.empty()) launch(used, buckets_[next_].name);
  }
  launch_late();
  forget_progress();
  return vote;
}

void Reducer::launch_late() {
  for (const int unit : order_) {
    if (!late_[unit]) continue;
    replicate(/*waits=*/true);
    const std::vector<bool> used = used_[unit];
    gradients_[unit]->settle(used);
    launch({static_cast<size_t>(unit)}, units_[unit]->layout().name);
  }
}

void Reducer::settle() {
  const std::lock_guard lock(mutex_);
  replicate(/*waits=*/true);
  // While one gather sends, the next one begins.
  for (const int unit : order_) gradients_[unit]->start_gather();
  for (const int unit : order_) {
    gradients_[unit]->settle(used_[unit]);
    std::fill(used_[unit].begin(), used_[unit].end(), false);
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
                units_[unit]->layout().slots[slot].name(),
                "' has a gradient that backward did not give it (.grad was set by hand). Call "
                "ShardedModule::reduce() on all ranks first, which reduces it with the others");
  });
  settle();
  return has_own_ || any_live();
}

void Reducer::clear_all() {
  const std::lock_guard lock(mutex_);
  for_each_handle([](size_t, size_t, size_t, const at::Tensor& tensor) { take_gradient(tensor); });
  replicate(/*waits=*/true);
  for (const auto& gradients : gradients_) gradients->clear_all();
  for (auto& slots : used_) std::fill(slots.begin(), slots.end(), false);
  forget_progress();
}

void Reducer::zero_all() {
  settle_earlier();  // only then it is known which parameters have gradients
  for (const auto& gradients : gradients_) gradients->zero_all();
  forget_progress();
}

// Resets the progress of a backward that is over, or whose gradients are gone.
void Reducer::forget_progress() {
  next_ = 0;
  std::fill(launched_.begin(), launched_.end(), false);
  in_flight_.clear();
  in_flight_bytes_ = 0;
  accumulating_ = false;
}

}  // namespace tessera
