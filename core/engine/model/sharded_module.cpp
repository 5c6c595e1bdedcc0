#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/engine/fully_shard.h>

#include <array>

#include "comm/group/progress.h"
#include "engine/model/full_state.h"
#include "engine/model/join_scope.h"
#include "engine/model/model_gradients.h"
#include "engine/model/unwrap_module.h"
#include "engine/unit/placement.h"

namespace tessera {
namespace {

// By `ShardLevel`.
constexpr std::array kLevelNames = {"none", "optimizer state", "gradients", "parameters"};

ParamIndex place_of(const ShardedState& state, const at::Tensor& parameter, const char* function) {
  const auto place = state.find(parameter);
  TORCH_CHECK_VALUE(place, "[", function,
                    "] the tensor must be a parameter of the sharded model; got one of shape ",
                    parameter.sizes());
  return *place;
}

ParamIndex place_of(const ShardedState& state, const std::string& name, const char* function) {
  const auto place = state.find(name);
  TORCH_CHECK_VALUE(place, "[", function, "] the sharded model has no parameter '", name, "'");
  return *place;
}

}  // namespace

ShardedModule::ShardedModule(std::shared_ptr<ShardedState> state) : state_(std::move(state)) {}

ShardedModule::NoSync::NoSync(std::shared_ptr<ShardedState> state) : state_(std::move(state)) {
  state_->reducer().enter_no_sync();
}
ShardedModule::NoSync::~NoSync() { state_->reducer().leave_no_sync(); }
ShardedModule::NoSync ShardedModule::no_sync() { return NoSync(state()); }

ShardedModule::KeepUnsharded::KeepUnsharded(std::shared_ptr<ShardedState> state)
    : state_(std::move(state)) {
  state_->residency().hold_all();
}
ShardedModule::KeepUnsharded::~KeepUnsharded() { state_->residency().release_all(); }
ShardedModule::KeepUnsharded ShardedModule::keep_unsharded() { return KeepUnsharded(state()); }

const std::shared_ptr<ShardedState>& ShardedModule::state() const {
  TORCH_CHECK(!state_->is_given_back(),
              "[tessera] the model was unwrapped: its parameters are ordinary tensors again, and "
              "the handles of the sharded model can't be used");
  return state_;
}

void ShardedModule::set_resident_bytes(int64_t nbytes) {
  const ShardPlan& plan = state()->plan();
  TORCH_CHECK_VALUE(nbytes >= -1 && !plan.memory_budget,
                    "[set_resident_bytes] the bytes must be -1 (no limit) or more, in a model "
                    "without plan.memory_budget; got ",
                    nbytes);
  state()->residency().set_limits({.resident_bytes = nbytes, .prefetch = plan.prefetch});
}

void ShardedModule::begin_forward() {
  ShardedState& model = *state();
  if (at::GradMode::is_enabled()) model.reducer().lockstep().begin_forward();
  model.residency().begin_forward();
  if (Progress* const progress = model.context().progress) progress->enter(Phase::kForward);
  model.buffers().finish_sync();
  if (!model.plan().sync_buffers || model.reducer().is_no_sync()) return;
  if (auto* scope = model.join_scope()) scope->announce(JoinCall::kForward);
  sync_buffers();
}

void ShardedModule::end_forward() {
  if (Progress* const progress = state()->context().progress) progress->enter(Phase::kUserCode);
}

void ShardedModule::sync_buffers(bool blocking) {
  state()->buffers().start_sync(state()->mesh());
  if (blocking) state()->buffers().finish_sync();
}

void ShardedModule::leave_out_of_checkpoints(const std::set<std::string>& buffers) {
  std::set<std::string> unknown = buffers;
  for (const NamedTensor& buffer : state()->buffers().of_module()) unknown.erase(buffer.name);
  TORCH_CHECK_VALUE(unknown.empty(),
                    "[leave_out_of_checkpoints] the names must be those of buffers; none is '",
                    *unknown.begin(), "'");
  state()->reducer().record(
      [&] { return fmt::format("leave_out_of_checkpoints({})", fmt::join(buffers, ", ")); });
  state()->buffers().leave_out(buffers);
}

void ShardedModule::reduce() {
  TORCH_CHECK(!state()->reducer().is_no_sync(),
              "[reduce] must be called after the no_sync() guard has ended");
  TORCH_CHECK(state()->reducer().reduce_waiting(),
              "[reduce] there must be gradients of a backward under no_sync(); no rank has any, "
              "maybe reduce() was called twice or there was no backward pass");
}

bool ShardedModule::casts_inputs() const {
  return state()->plan().precision.param_dtype && state()->plan().precision.cast_inputs;
}

at::Tensor ShardedModule::cast_tensor(const at::Tensor& input) const {
  if (!input.defined() || !input.is_floating_point()) return input;
  return input.to(*state()->plan().precision.param_dtype);
}

void ShardedModule::refuse_to_cast() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "[forward] inputs can't be converted to param_dtype, because the "
                              "module's forward takes a tensor by reference to change it; set "
                              "precision.cast_inputs to false and convert them yourself");
}

at::Tensor ShardedModule::full_value(const at::Tensor& parameter) {
  return tessera::full_value(*state(), place_of(*state(), parameter, "full_value"));
}

at::Tensor ShardedModule::gather(const at::Tensor& parameter, const at::Tensor& part) {
  return gather_part(*state(), place_of(*state(), parameter, "gather"), part);
}
at::Tensor ShardedModule::cut(const at::Tensor& parameter, const at::Tensor& whole) {
  return cut_part(*state(), place_of(*state(), parameter, "cut"), whole, "cut");
}

at::Tensor ShardedModule::full_grad(const at::Tensor& parameter) {
  return tessera::full_grad(*state(), place_of(*state(), parameter, "full_grad"));
}
at::Tensor ShardedModule::full_grad(const std::string& name) {
  return tessera::full_grad(*state(), place_of(*state(), name, "full_grad"));
}

void ShardedModule::set_full_grad(const at::Tensor& parameter, const at::Tensor& value) {
  tessera::set_full_grad(*state(), place_of(*state(), parameter, "set_full_grad"), value);
}

at::Tensor ShardedModule::local_grad(const at::Tensor& parameter) {
  return tessera::local_grad(*state(), place_of(*state(), parameter, "local_grad"));
}
at::Tensor ShardedModule::local_grad(const std::string& name) {
  return tessera::local_grad(*state(), place_of(*state(), name, "local_grad"));
}

bool ShardedModule::has_grad(const at::Tensor& parameter) {
  return tessera::has_grad(*state(), place_of(*state(), parameter, "has_grad"));
}

bool ShardedModule::has_reduced_grad(const at::Tensor& parameter) {
  return tessera::has_reduced_grad(*state(), place_of(*state(), parameter, "has_reduced_grad"));
}

at::ScalarType ShardedModule::grad_dtype(const at::Tensor& parameter) {
  return state()->units()[place_of(*state(), parameter, "grad_dtype").unit]->layout().master_dtype;
}

bool ShardedModule::any_rank(bool value) {
  return state()->mesh().any(value, {"any rank", Channel::kControl});
}

void ShardedModule::zero_grad(bool set_to_none) {
  Reducer& reducer = state()->reducer();
  set_to_none ? reducer.clear_all() : reducer.zero_all();
}

void ShardedModule::zero_grad(const at::Tensor& parameter, bool set_to_none) {
  const ParamIndex place = place_of(*state(), parameter, "zero_grad");
  if (!set_to_none) state()->reducer().settle();  // only then it is known whether it has a gradient
  state()->reducer().gradients()[place.unit]->zero_grad(place.slot, set_to_none);
}

void ShardedModule::unwrap() { tessera::unwrap(*state()); }

double ShardedModule::clip_grad_norm_(double max_norm, const ClipOptions& options) {
  const ClipCall call = clip_call(*state(), max_norm, options);
  state()->announce(JoinCall::kClip, call.numbers());
  return clip(*state(), call);
}

std::vector<NamedTensor> ShardedModule::full_state() { return tessera::full_state(*state()); }

void ShardedModule::load_full_state(const std::vector<NamedTensor>& state, bool strict) {
  tessera::load_full_state(*this->state(), state, strict);
}

ShardMemory ShardedModule::memory() const {
  ShardMemory memory;
  for (const auto& unit : state()->units()) {
    memory.parameters += unit->resident_nbytes();
    if (unit->master().exists())
      (unit->master().is_offloaded() ? memory.offloaded : memory.master_weights) +=
          static_cast<int64_t>(unit->master().values().nbytes());
  }
  for (const auto& gradients : state()->reducer().gradients())
    memory.gradients += gradients->nbytes();
  memory.peak_unsharded = state()->context().peak_unsharded_bytes;
  memory.peak_in_flight = state()->reducer().peak_in_flight_bytes();
  return memory;
}

std::string ShardedModule::describe() const {
  std::string text = fmt::format("{:>4}  {:>12}  {:>12}  {:<15}  {}\n", "unit", "elements",
                                 "my shard", "sharded", "parameters");
  for (const auto& unit : state()->units()) {
    const UnitLayout& layout = unit->layout();
    text += fmt::format("{:>4}  {:>12}  {:>12}  {:<15}  {}\n", unit->index(), layout.numel(),
                        layout.shard_numel(unit->mesh().shard().rank()),
                        kLevelNames.at(static_cast<size_t>(layout.level)), layout.name);
    for (const ParamSlot& slot : layout.slots)
      if (slot.cut != Cut::kAnywhere)
        text += fmt::format("      {}: {}\n", slot.name(),
                            cut_text(slot.cut, slot.block, owner_of(layout, slot)));
  }
  return text;
}

}  // namespace tessera
