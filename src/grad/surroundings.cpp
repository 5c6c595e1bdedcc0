#include "grad/surroundings.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <mutex>

namespace tessera {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

RandomState random_state_of(const std::vector<at::Generator>& generators) {
  RandomState state;
  for (const at::Generator& generator : generators)
    state.emplace_back(generator, state_of(generator));
  return state;
}

RandomStateScope::RandomStateScope(const RandomState& state) {
  for (const auto& [generator, wanted] : state) {
    outer_.emplace_back(generator, state_of(generator));
    set_state(generator, wanted);
  }
}

// In reverse order, so that a generator that is listed twice gets its first state back.
RandomStateScope::~RandomStateScope() {
  for (auto it = outer_.rbegin(); it != outer_.rend(); ++it) set_state(it->first, it->second);
}

AutocastState AutocastState::current() {
  AutocastState state;
  for (const at::DeviceType type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    state.devices.push_back(
        {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  state.cache_enabled = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::set() const {
  for (const auto& [type, enabled, dtype] : devices) {
    at::autocast::set_autocast_enabled(type, enabled);
    at::autocast::set_autocast_dtype(type, dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_enabled);
}

AutocastScope::AutocastScope(AutocastState state) : outer_(AutocastState::current()) {
  state.cache_enabled = false;
  state.set();
}

PlainScriptScope::PlainScriptScope() : outer_(torch::jit::getGraphExecutorOptimize()) {
  torch::jit::setGraphExecutorOptimize(false);
}

PlainScriptScope::~PlainScriptScope() { torch::jit::setGraphExecutorOptimize(outer_); }

}  // namespace tessera
