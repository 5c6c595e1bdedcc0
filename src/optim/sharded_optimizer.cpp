#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>
#include <tessera/sharded_optimizer.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include "access/sharded_state.h"
#include "optim/fused_step.h"
#include "optim/param_state.h"
#include "optim/segments.h"
#include "optim/sharded_optimizer_access.h"
#include "unit/agreement.h"

namespace tessera {

struct ShardedOptimizer::Impl {
  ShardedModule module;
  torch::optim::Optimizer* optimizer;
  ShardedOptimizerOptions options;
  std::vector<Segment> segments;

  ShardedState& state() { return *module.state(); }
  void set_gradients();
  void clear_gradients();
  std::vector<bool> changed_units();
};

// Shows the reduced gradients to the optimizer as those of its segments.
void ShardedOptimizer::Impl::set_gradients() {
  const auto& gradients = state().reducer().gradients();
  for (const Segment& segment : segments) {
    if (!segment.tensor.defined() || !gradients[segment.place.unit]->is_live(segment.place.slot))
      continue;
    const at::Tensor grad = gradients[segment.place.unit]->reduced(segment.begin, segment.end);
    segment.tensor.mutable_grad() = at::as_strided(grad, segment.tensor.sizes(),
                                                   segment.tensor.strides(), grad.storage_offset());
  }
}

void ShardedOptimizer::Impl::clear_gradients() {
  for (const Segment& segment : segments) {
    if (segment.tensor.defined()) segment.tensor.mutable_grad().reset();
  }
}

std::vector<bool> ShardedOptimizer::Impl::changed_units() {
  std::vector<bool> changed(state().units().size(), false);
  const auto& gradients = state().reducer().gradients();
  for (const Segment& segment : segments) {
    if (gradients[segment.place.unit]->is_live(segment.place.slot))
      changed[segment.place.unit] = true;
  }
  return changed;
}

ShardedOptimizer::ShardedOptimizer(const ShardedModule& module, torch::optim::Optimizer& optimizer,
                                   const ShardedOptimizerOptions& options)
    : impl_(new Impl{module, &optimizer, options, {}}) {
  ShardedState& state = impl_->state();
  check_on_all_ranks(state.process_group(), [&] { check_optimizer(state, optimizer); });
  impl_->segments = adopt_optimizer(state, optimizer);
}

ShardedOptimizer::~ShardedOptimizer() = default;
ShardedOptimizer::ShardedOptimizer(ShardedOptimizer&&) noexcept = default;
ShardedOptimizer& ShardedOptimizer::operator=(ShardedOptimizer&&) noexcept = default;

void ShardedOptimizer::step() {
  at::NoGradGuard no_grad;
  ShardedState& state = impl_->state();
  TORCH_CHECK(state.reducer().any_gradient(),
              "[step] there must be a backward since the last zero_grad(); no parameter of the sharded model "
              "has a gradient (a backward under no_sync() alone reduces nothing)");
  for (const auto& unit : state.units()) {
    unit->check_views();
    unit->wait_until_unread();
  }
  {
    OpenGates gates;
    impl_->set_gradients();
    if (!impl_->options.fused || !fused_step(*impl_->optimizer)) impl_->optimizer->step();
    impl_->clear_gradients();
  }
  state.residency().on_step(impl_->changed_units());
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

void ShardedOptimizer::zero_grad() { impl_->state().reducer().clear_all(); }

double ShardedOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  return impl_->module.clip_grad_norm_(max_norm, norm_type);
}

torch::optim::Optimizer& ShardedOptimizer::inner() const { return *impl_->optimizer; }
ShardedModule ShardedOptimizer::module() const { return impl_->module; }

ShardMemory ShardedOptimizer::memory() const {
  ShardMemory memory = impl_->module.memory();
  memory.optimizer_state = state_nbytes(*impl_->optimizer);
  return memory;
}

const std::vector<Segment>& segments_of(const ShardedOptimizer& optimizer) {
  return optimizer.impl_->segments;
}

}  // namespace tessera
