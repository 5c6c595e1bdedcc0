#include <fmt/format.h>
#include <tessera/fully_shard.h>

#include "access/clip_call.h"
#include "access/join_scope.h"
#include "access/sharded_state.h"

namespace tessera {
namespace {

const char* level_name(ShardLevel level) {
  switch (level) {
    case ShardLevel::kNone:
      return "none";
    case ShardLevel::kOptimizerState:
      return "optimizer state";
    case ShardLevel::kGradients:
      return "gradients";
    case ShardLevel::kParameters:
      return "parameters";
  }
  return "?";
}

}  // namespace

ShardedModule::ShardedModule(std::shared_ptr<ShardedState> state) : state_(std::move(state)) {}
ShardedModule::~ShardedModule() = default;
ShardedModule::ShardedModule(const ShardedModule&) = default;
ShardedModule& ShardedModule::operator=(const ShardedModule&) = default;

ShardedModule::NoSync::NoSync(std::shared_ptr<ShardedState> state) : state_(std::move(state)) {
  state_->reducer().enter_no_sync();
}
ShardedModule::NoSync::~NoSync() { state_->reducer().leave_no_sync(); }
ShardedModule::NoSync ShardedModule::no_sync() { return NoSync(state_); }

ShardedModule::KeepUnsharded::KeepUnsharded(std::shared_ptr<ShardedState> state)
    : state_(std::move(state)) {
  state_->residency().hold_all();
}
ShardedModule::KeepUnsharded::~KeepUnsharded() { state_->residency().release_all(); }
ShardedModule::KeepUnsharded ShardedModule::keep_unsharded() { return KeepUnsharded(state_); }

void ShardedModule::begin_forward() {
  state_->finish_sync_buffers();
  if (!state_->plan().sync_buffers || state_->reducer().is_no_sync()) return;
  if (auto* scope = state_->join_scope()) scope->announce(JoinCall::kForward);
  sync_buffers();
}

void ShardedModule::sync_buffers(bool blocking) {
  state_->start_sync_buffers();
  if (blocking) state_->finish_sync_buffers();
}

void ShardedModule::reduce() {
  TORCH_CHECK(!state_->reducer().is_no_sync(), "[reduce] must be called after the no_sync() guard has ended");
  TORCH_CHECK(state_->reducer().reduce_waiting(), "[reduce] there must be gradients of a backward under no_sync(); no "
              "rank has any, maybe reduce() was called twice or there was no backward pass");
}

bool ShardedModule::casts_inputs() const {
  return state_->plan().precision.param_dtype && state_->plan().precision.cast_inputs;
}

at::Tensor ShardedModule::cast_tensor(const at::Tensor& input) const {
  if (!input.defined() || !input.is_floating_point()) return input;
  return input.to(*state_->plan().precision.param_dtype);
}

void ShardedModule::refuse_to_cast() {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "[forward] inputs can't be converted to param_dtype, because the module's "
                              "forward takes a tensor by reference to change it; set precision.cast_inputs to false "
                              "and convert them yourself");
}

at::Tensor ShardedModule::full_grad(const at::Tensor& parameter) {
  const auto place = state_->find(parameter);
  TORCH_CHECK_VALUE(place, "[full_grad] the tensor must be a parameter of the sharded model; got one of shape ",
                    parameter.sizes());
  return state_->full_grad(*place);
}

at::Tensor ShardedModule::full_grad(const std::string& name) {
  const auto place = state_->find(name);
  TORCH_CHECK_VALUE(place, "[full_grad] the sharded model has no parameter '", name, "'");
  return state_->full_grad(*place);
}

void ShardedModule::zero_grad() { state_->reducer().clear_all(); }

double ShardedModule::clip_grad_norm_(double max_norm, double norm_type) {
  return clip_grad_norm_(max_norm, ClipOptions{.norm_type = norm_type});
}

double ShardedModule::clip_grad_norm_(double max_norm, const ClipOptions& options) {
  const ClipCall call(*state_, max_norm, options);
  if (auto* scope = state_->join_scope()) scope->announce(JoinCall::kClip, call.values());
  return call.run(*state_);
}

std::vector<NamedTensor> ShardedModule::full_state() { return state_->full_state(); }

void ShardedModule::load_full_state(const std::vector<NamedTensor>& state, bool strict) {
  state_->load_full_state(state, strict);
}

ShardMemory ShardedModule::memory() const {
  ShardMemory memory;
  for (const auto& unit : state_->units()) {
    memory.parameters += unit->resident_nbytes();
    if (unit->master().defined())
      (unit->is_offloaded() ? memory.offloaded : memory.master_weights) +=
          static_cast<int64_t>(unit->master().nbytes());
  }
  for (const auto& gradients : state_->reducer().gradients())
    memory.gradients += gradients->nbytes();
  memory.peak_unsharded = state_->context().peak_unsharded_bytes;
  memory.peak_in_flight = state_->reducer().peak_in_flight_bytes();
  return memory;
}

std::string ShardedModule::describe() const {
  std::string text = fmt::format("{:>4}  {:>12}  {:>12}  {:<15}  {}\n", "unit", "elements",
                                 "my shard", "sharded", "parameters");
  for (const auto& unit : state_->units()) {
    const UnitLayout& layout = unit->layout();
    text += fmt::format("{:>4}  {:>12}  {:>12}  {:<15}  {}\n", unit->index(), layout.numel(),
                        layout.shard_numel(unit->context().mesh.shard().rank()),
                        level_name(layout.level), layout.name);
  }
  return text;
}

}  // namespace tessera
