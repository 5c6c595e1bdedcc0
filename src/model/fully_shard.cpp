#include <tessera/fully_shard.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <utility>

#include "grad/grad_gate.h"
#include "model/named_tensors.h"
#include "model/sharded_state.h"

namespace tessera {
namespace {

template <class Items>
std::vector<NamedTensor> scripted_tensors(const Items& items) {
  std::vector<NamedTensor> result;
  for (const auto& item : items) result.push_back({item.name, item.value});
  return result;
}

// The unit of a parameter, even if the parameter was given other data.
const Unit* owner_of(const at::Tensor& param) {
  if (const Unit* const unit = unit_of(param)) return unit;
  const auto gradients = gradients_behind(param);
  return gradients ? &gradients->unit() : nullptr;
}

}  // namespace

std::shared_ptr<ShardedState> state_of(const torch::nn::Module& module) {
  for (const at::Tensor& param : module.parameters()) {
    const Unit* const unit = owner_of(param);
    auto* state = unit ? dynamic_cast<ShardedState*>(&unit->listener()) : nullptr;
    if (state) return state->shared_from_this();
  }
  return nullptr;
}

namespace detail {

std::shared_ptr<ShardedState> shard(torch::nn::Module& module, const ShardPlan& plan) {
  return ShardedState::create(named_tensors(module.named_parameters()),
                              named_tensors(module.named_buffers()), plan);
}

std::shared_ptr<ShardedState> shard(torch::jit::Module& module, const ShardPlan& plan) {
  return ShardedState::create(scripted_tensors(module.named_parameters()),
                              scripted_tensors(module.named_buffers()), plan);
}

}  // namespace detail

ShardedModule fully_shard(torch::jit::Module& module, const ShardPlan& plan) {
  return ShardedModule(detail::shard(module, plan));
}

}  // namespace tessera
