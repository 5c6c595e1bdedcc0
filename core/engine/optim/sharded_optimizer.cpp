#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/engine/sharded_optimizer.h>
#include <torch/optim/optimizer.h>

#include <typeinfo>
#include <vector>

#include "comm/group/progress.h"
#include "engine/grad/grad_gate.h"
#include "engine/model/model_gradients.h"
#include "engine/model/sharded_state.h"
#include "engine/optim/adam_loop.h"
#include "engine/optim/cpu_adam_step.h"
#include "engine/optim/fused_step.h"
#include "engine/optim/joined_training.h"
#include "engine/optim/kept_units.h"
#include "engine/optim/master_digits.h"
#include "engine/optim/muon_step.h"
#include "engine/optim/optimizer_parameters.h"
#include "engine/optim/outer_steps.h"
#include "engine/optim/param_state.h"
#include "engine/optim/part_state.h"
#include "engine/optim/segment_gradients.h"
#include "engine/optim/segments.h"
#include "engine/optim/sharded_optimizer_access.h"
#include "engine/optim/state_replacement.h"
#include "engine/unit/note_write.h"

namespace tessera {

struct ShardedOptimizer::Impl {
  ShardedModule module;
  torch::optim::Optimizer* optimizer;
  ShardedOptimizerOptions options;
  bool fuses = options.fused;
  std::vector<Segment> segments = {};
  int64_t steps = 0;
  std::shared_ptr<ShardedState> used = module.state();  // null after unwrap()
  // Null: the plan has none.
  std::unique_ptr<OuterSteps> outer = make_outer(*module.state());

  static std::unique_ptr<OuterSteps> make_outer(ShardedState& state) {
    return state.plan().outer ? std::make_unique<OuterSteps>(state) : nullptr;
  }

  ShardedState& state() {
    TORCH_CHECK(used, "[ShardedOptimizer] was unwrapped: step the optimizer that it was made for");
    return *module.state();
  }
  ~Impl() { leave(); }
  void leave() {
    if (used) used->context().watch.forget_optimizer(this);
    used.reset();
  }
  // A derived class may step differently.
  bool steps_rounding() const { return typeid(*optimizer) == typeid(CPUAdam); }
  void reserve_state();
  void adopt();
  void follow();
  void tell(MemoryEvent event);
  void guard_parts();
  void offload_state(const Segment& segment);
  void offload_state();
  RoundedParams rounded_params(const std::vector<const Segment*>& live);
  std::vector<std::vector<const Segment*>> live_segments(std::vector<bool>& changed);
  std::vector<CutMatrix> cut_matrices(std::optional<size_t> unit);
  void run(const std::vector<const Segment*>& live, const std::vector<at::Tensor>& gradients,
           std::optional<size_t> unit = std::nullopt);
  std::vector<bool> step(const WorkPtr& stopped_reading);
  void step_with_others();
  void skip_step();
  int64_t state_bytes() const { return state_nbytes(*optimizer) + (outer ? outer->nbytes() : 0); }
};

// Reserves memory for the state that the optimizer will make at its first steps, while a failure
// can still be reported to all ranks.
void ShardedOptimizer::Impl::reserve_state() {
  const auto& memory = state().context().offload;
  if (!memory) return;
  std::vector<int64_t> nbytes;
  for (auto& param_group : optimizer->param_groups()) {
    for (const at::Tensor& param : param_group.params()) {
      const auto place = state().find(param);
      if (!place) continue;  // adopted before
      const Unit& unit = *state().units()[place->unit];
      const auto [begin, end] = unit.updated_range(state().slot(*place));
      for (const StateTensor& tensor :
           state_tensors(*optimizer, param_group, unit.layout().master_dtype, {end - begin}))
        nbytes.push_back(tensor.nbytes());
    }
  }
  if (outer) {
    const auto more = outer->offloaded_sizes();
    nbytes.insert(nbytes.end(), more.begin(), more.end());
  }
  memory->reserve(nbytes);
}

// Moves the state that the optimizer has made for a segment to the offload memory.
void ShardedOptimizer::Impl::offload_state(const Segment& segment) {
  if (!segment.tensor.defined() || !state().units()[segment.place.unit]->master().is_offloaded())
    return;
  const auto& memory = state().context().offload;
  replace_state_tensors(*optimizer, segment.tensor, [&](const at::Tensor& tensor) {
    if (memory->holds(tensor)) return tensor;
    const at::Tensor flat = memory->empty(tensor.numel(), tensor.scalar_type());
    if (!tensor.is_non_overlapping_and_dense()) return flat.view(tensor.sizes()).copy_(tensor);
    return at::as_strided(flat, tensor.sizes(), tensor.strides()).copy_(tensor);
  });
}

void ShardedOptimizer::Impl::guard_parts() {
  std::vector<const Segment*> all;
  for (const Segment& segment : segments) all.push_back(&segment);
  tessera::guard_parts(state(), *optimizer, all);
}

void ShardedOptimizer::Impl::offload_state() {
  guard_parts();
  for (const Segment& segment : segments) offload_state(segment);
  if (const auto& memory = state().context().offload) memory->rest();
}

// Returns the memory into which `publish()` would copy the updated values, if CPUAdam can write
// there itself: this saves one pass over the masters' values. Undefined otherwise.
static at::Tensor publish_target(const Unit& unit) {
  const UnitLayout& layout = unit.layout();
  if (!unit.master().exists() || unit.frees() || layout.rounds() || !layout.device.is_cpu() ||
      !adam_loop(layout.master_dtype, layout.master_dtype, layout.dtype))
    return {};
  return unit.full().narrow(0, unit.updated_begin(), unit.updated_end() - unit.updated_begin());
}

RoundedParams ShardedOptimizer::Impl::rounded_params(const std::vector<const Segment*>& live) {
  RoundedParams rounded;
  for (const Segment* segment : live) {
    const Unit& unit = *state().units()[segment->place.unit];
    const at::Tensor target = publish_target(unit);
    if (!target.defined()) continue;
    const at::Tensor& tensor = segment->tensor;
    rounded[tensor.unsafeGetTensorImpl()] =
        at::as_strided(target, tensor.sizes(), tensor.strides(),
                       target.storage_offset() + segment->begin - unit.updated_begin());
  }
  return rounded;
}

void ShardedOptimizer::Impl::tell(MemoryEvent event) {
  MemoryWatch& watch = state().context().watch;
  if (!watch.is_active()) return;
  watch.before_change();
  watch.count_optimizer_state();
  watch.tell(event);
}

// Returns the matrices that are to be stepped of which ranks have parts, of one unit or of all: the
// same on all ranks.
std::vector<CutMatrix> ShardedOptimizer::Impl::cut_matrices(std::optional<size_t> unit) {
  std::vector<CutMatrix> matrices;
  for (const Segment& segment : segments) {
    const ParamSlot& slot = state().slot(segment.place);
    if ((unit && *unit != segment.place.unit) || keeps_matrices(slot) ||
        steps_elementwise(*optimizer, segment.param_group) ||
        !state().reducer().gradients()[segment.place.unit]->is_live(segment.place.slot))
      continue;
    const Unit& own = *state().units()[segment.place.unit];
    const UnitLayout& layout = own.layout();
    CutMatrix matrix{.slot = &slot,
                     .ranks = &own.mesh(),
                     .param_group = segment.param_group,
                     .device = own.updated().device(),
                     .part = segment.tensor};
    for (const int64_t bound : layout.bounds)
      matrix.bounds.push_back(overlap(slot, bound, bound).first - slot.offset);
    if (layout.level == ShardLevel::kNone) {  // each rank has all, and steps it alone
      matrix.ranks = &state().context().own;
      matrix.bounds = {0, slot.numel};
    }
    matrices.push_back(std::move(matrix));
  }
  return matrices;
}

// Steps the optimizer on these segments only, with `gradients` as `.grad`; they are those of a
// `unit`, or all.
void ShardedOptimizer::Impl::run(const std::vector<const Segment*>& live,
                                 const std::vector<at::Tensor>& gradients,
                                 std::optional<size_t> unit) {
  OpenGates gates;
  for (size_t i = 0; i < live.size(); ++i) {
    const at::Tensor &tensor = live[i]->tensor, &grad = gradients[i];
    tensor.mutable_grad() =
        at::as_strided(grad, tensor.sizes(), tensor.strides(), grad.storage_offset());
  }
  if (steps_rounding()) {
    step_cpu_adam(static_cast<CPUAdam&>(*optimizer), rounded_params(live));
  } else if (steps_matrices(*optimizer)) {
    step_muon(static_cast<Muon&>(*optimizer), cut_matrices(unit));
  } else if (!fuses || !fused_step(*optimizer)) {
    optimizer->step();
  }
  for (const Segment* segment : live) segment->tensor.mutable_grad().reset();
  tessera::guard_parts(state(), *optimizer, live);
}

// Returns the segments that this rank steps, in lists that are stepped one after the other: one for
// each unit if state is offloaded, otherwise a single one. Sets which units change, on this rank or
// another.
std::vector<std::vector<const Segment*>> ShardedOptimizer::Impl::live_segments(
    std::vector<bool>& changed) {
  const bool by_unit = state().context().offload != nullptr;
  std::vector<std::vector<const Segment*>> live(by_unit ? changed.size() : 1);
  for (const Segment& segment : segments) {
    const auto [unit, slot] = segment.place;
    const bool is_live = state().reducer().gradients()[unit]->is_live(slot);
    // Where the user reduces, ranks may differ in which parameters have a gradient.
    if (is_live || !state().reducer().reduces()) {
      changed[unit] = true;
      note_write(state().slot(segment.place));
    }
    if (!is_live) continue;
    if (segment.tensor.defined()) live[by_unit ? unit : 0].push_back(&segment);
  }
  return live;
}

// Returns which units have changed, on this rank or another.
std::vector<bool> ShardedOptimizer::Impl::step(const WorkPtr& stopped_reading) {
  const auto& units = state().units();
  const auto& memory = state().context().offload;
  std::vector<bool> changed(units.size(), false);
  const auto live = live_segments(changed);
  state().wait_until_unread(stopped_reading);
  tell(MemoryEvent::kStepBegin);
  // While the host steps a unit, the gradients of the next one are copied to it.
  std::vector<SegmentGradients> gradients(live.size());
  size_t begun = 0;
  const auto ahead = [&] {
    while (begun < live.size() && live[begun].empty()) ++begun;
    if (begun == live.size()) return;
    gradients[begun].begin(state(), live[begun]);
    ++begun;
  };
  ahead();
  if (!memory) run(live[0], gradients[0].take());
  for (const auto& unit : units) {
    const int index = unit->index();
    if (memory && (!live[index].empty() || (changed[index] && steps_matrices(*optimizer)))) {
      if (!live[index].empty()) ahead();
      run(live[index], gradients[index].take(), index);
      for (const Segment* segment : live[index]) offload_state(*segment);
    }
    const bool is_published = steps_rounding() && publish_target(*unit).defined();
    if (changed[index] && !is_published) unit->publish();
    if (memory) memory->rest();
  }
  return changed;
}

// The fused kernels read state in the parameter's dtype. State has another dtype if the optimizer
// made it before the model was converted.
static bool has_state_like_parameters(const torch::optim::Optimizer& optimizer,
                                      const std::vector<Segment>& segments) {
  if (!knows_state(optimizer)) return true;  // there is no fused kernel for it, either
  for (const Segment& segment : segments) {
    if (!segment.tensor.defined()) continue;
    for (const auto& [name, tensor] : read_param_state(optimizer, segment.tensor).tensors)
      if (tensor.scalar_type() != segment.tensor.scalar_type()) return false;
  }
  return true;
}

// Adopts the parameters in the param groups.
void ShardedOptimizer::Impl::adopt() {
  segments = adopt_optimizer(state(), *optimizer, segments);
  fuses = options.fused && has_state_like_parameters(*optimizer, segments);
  offload_state();
}

// Adopts parameters that the user has put into the param groups since, and follows the master
// copies of parameters that were frozen and are trained now.
void ShardedOptimizer::Impl::follow() {
  state().thaw_trained();
  follow_thawed(state(), *optimizer, segments);
  guard_parts();
  if (has_only(*optimizer, segments)) return check_small_state(state(), *optimizer, segments);
  check_optimizer(state(), *optimizer, options.elementwise, segments);
  reserve_state();
  adopt();
}

// Returns the options of a step. They must be the same on all ranks.
static std::string step_text(torch::optim::Optimizer& optimizer) {
  std::string text = "a step with";
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    for (const auto& [name, value] : step_options(optimizer, i))
      text += fmt::format(" {} {}", name, value);
    text += fmt::format(" for {} parameters;", optimizer.param_groups()[i].params().size());
  }
  return text;
}

static void check_clipping(const ShardedState& state, const ShardedOptimizerOptions& options) {
  TORCH_CHECK_VALUE(
      options.max_grad_norm >= 0,
      "[ShardedOptimizer] options.max_grad_norm must be positive, or 0 not to clip; got ",
      options.max_grad_norm);
  TORCH_CHECK_VALUE(options.max_grad_norm > 0 || options.clip == ClipOptions{},
                    "[ShardedOptimizer] options.clip needs options.max_grad_norm, which is 0: "
                    "nothing is clipped");
  if (options.max_grad_norm > 0) clip_call(state, options.max_grad_norm, options.clip);
}

ShardedOptimizer::ShardedOptimizer(const ShardedModule& module, torch::optim::Optimizer& optimizer,
                                   const ShardedOptimizerOptions& options)
    : impl_(new Impl{module, &optimizer, options}) {
  ShardedState& state = impl_->state();
  state.thaw_trained();
  check_on_all_ranks(state.mesh(), [&] {
    check_optimizer(state, optimizer, options.elementwise);
    check_clipping(state, options);
    impl_->reserve_state();
  });
  impl_->adopt();
  state.context().watch.add_optimizer(impl_.get(),
                                      [impl = impl_.get()] { return impl->state_bytes(); });
}

ShardedOptimizer::~ShardedOptimizer() = default;
ShardedOptimizer::ShardedOptimizer(ShardedOptimizer&&) noexcept = default;
ShardedOptimizer& ShardedOptimizer::operator=(ShardedOptimizer&&) noexcept = default;

static bool trains_any(const ShardedState& state) {
  for (const auto& unit : state.units())
    for (const ParamSlot& slot : unit->layout().slots)
      if (const at::Tensor param = slot.tensor(); param.defined() && param.requires_grad())
        return true;
  return false;
}

// The part of a step in which this rank may wait for others.
void ShardedOptimizer::Impl::step_with_others() {
  ShardedState& state = this->state();
  state.residency().check_unused("step");
  state.check_not_exchanged("step");
  announce_step(state, *optimizer);
  follow();
  const WorkPtr stopped = state.stop_reading();
  state.reducer().record([&] { return step_text(*optimizer); });
  TORCH_CHECK(state.reducer().any_gradient() || trains_any(state),
              "[step] a parameter must require gradients; all of the sharded model are frozen");
  TORCH_CHECK(state.reducer().any_gradient(),
              "[step] there must be a backward since the last zero_grad(); no parameter of the "
              "sharded model has a reduced gradient. After backwards under no_sync() alone, call "
              "reduce() of the model first");
  if (options.max_grad_norm > 0) clip(state, clip_call(state, options.max_grad_norm, options.clip));
  for (const auto& unit : state.units()) unit->views().check();
  restore_digits(state, segments);
  for (Segment& segment : segments) segment.digits.reset();
  if (outer) outer->begin_step(segments);
  std::vector<bool> changed = step(stopped);
  if (outer) outer->end_step(changed);
  ++steps;
  state.reducer().lockstep().end_step();
  tell(MemoryEvent::kStepEnd);
  // Parameters that autocast has cast and cached are out of date.
  if (at::autocast::is_autocast_cache_enabled()) at::autocast::clear_cache();
  const std::string misfit = state.ends().fit_memory();
  state.residency().on_step(changed);
  TORCH_CHECK(misfit.empty(), misfit);
}

// Replicas whose scalers skip different steps still average after equally many.
void ShardedOptimizer::Impl::skip_step() {
  if (!outer) return;
  ShardedState& state = this->state();
  state.check_not_exchanged("step");
  const PhaseScope phase(state.context().progress, Phase::kStep);
  follow();
  outer->begin_step(segments);
  const bool averages = outer->is_last();
  if (averages) state.end_reading();
  std::vector<bool> changed(state.units().size(), false);
  outer->end_step(changed);
  if (averages) state.residency().on_step(changed);
}

void ShardedOptimizer::step() {
  at::NoGradGuard no_grad;
  Progress* const progress = impl_->state().context().progress;
  {
    const PhaseScope phase(progress, Phase::kStep);
    impl_->step_with_others();
  }
  if (progress) progress->finish_step(impl_->steps);
}

at::Tensor ShardedOptimizer::step(const std::function<at::Tensor()>& closure) {
  at::Tensor loss;
  {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  step();
  return loss;
}

void ShardedOptimizer::zero_grad(bool set_to_none) {
  clear_gradients(impl_->state(), *impl_->optimizer, impl_->segments, set_to_none);
}

double ShardedOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  return impl_->module.clip_grad_norm_(max_norm, norm_type);
}

double ShardedOptimizer::clip_grad_norm_(double max_norm, const ClipOptions& options) {
  return impl_->module.clip_grad_norm_(max_norm, options);
}

int64_t ShardedOptimizer::keep_on_device(int64_t nbytes) {
  ShardedState& state = impl_->state();
  TORCH_CHECK_VALUE(nbytes >= 0, "[keep_on_device] the number of bytes must not be negative; got ",
                    nbytes);
  TORCH_CHECK(state.context().offload,
              "[keep_on_device] the plan must offload master weights and state; expected "
              "Offload::kHost or Offload::kDirectory, got Offload::kNone");
  impl_->follow();
  check_small_state(state, *impl_->optimizer, impl_->segments, /*on_device=*/true);
  return bring_units_back(state, *impl_->optimizer, impl_->segments, nbytes);
}

int64_t ShardedOptimizer::steps_since_average() const {
  return impl_->outer ? impl_->outer->position() : 0;
}

int64_t ShardedOptimizer::steps() const { return impl_->steps; }
void ShardedOptimizer::set_steps(int64_t steps) {
  impl_->steps = steps;
  Progress* const progress = impl_->used ? impl_->used->context().progress : nullptr;
  if (progress) progress->finish_step(steps);
}

torch::optim::Optimizer& ShardedOptimizer::inner() const {
  impl_->state();  // throws after unwrap()
  return *impl_->optimizer;
}
ShardedModule ShardedOptimizer::module() const { return impl_->module; }

ShardMemory ShardedOptimizer::memory() const {
  ShardMemory memory = impl_->module.memory();
  memory.optimizer_state = impl_->state_bytes();
  if (!impl_->state().context().offload) return memory;
  int64_t kept = kept_state_nbytes(impl_->state(), *impl_->optimizer, impl_->segments);
  if (impl_->outer) kept += impl_->outer->nbytes() - impl_->outer->offloaded_nbytes();
  memory.offloaded += memory.optimizer_state - kept;
  memory.optimizer_state = kept;
  return memory;
}

void ShardedOptimizer::unwrap() {
  at::NoGradGuard no_grad;
  if (impl_->outer) impl_->outer->check_averaged("unwrap");
  const OptimizerStateDict whole = full_inner_state(*this, /*recipient=*/-1);
  torch::optim::Optimizer& optimizer = *impl_->optimizer;
  erase_state(optimizer);
  give_back_parameters(impl_->state(), optimizer, impl_->segments);
  replace_state(optimizer, whole, "unwrap");
  impl_->leave();
}

OuterSteps* OptimizerAccess::outer_steps() const { return impl_.outer.get(); }

void OptimizerAccess::skip_step() const {
  at::NoGradGuard no_grad;
  impl_.skip_step();
}

void OptimizerAccess::offload_state() const { impl_.offload_state(); }

void OptimizerAccess::give_back() const {
  segments();
  give_back_optimizer(impl_.state(), *impl_.optimizer, impl_.segments);
  impl_.segments.clear();
}

void OptimizerAccess::set_master_digits(std::vector<at::Tensor> parts) const {
  for (size_t i = 0; i < parts.size(); ++i) impl_.segments[i].digits = std::move(parts[i]);
}

const std::vector<Segment>& OptimizerAccess::segments() const {
  impl_.follow();
  restore_digits(impl_.state(), impl_.segments);
  return impl_.segments;
}

}  // namespace tessera
