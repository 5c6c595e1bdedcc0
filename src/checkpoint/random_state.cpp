#include "checkpoint/random_state.h"

#include <ATen/Context.h>
#include <tessera/generator.h>

#include <mutex>

namespace tessera {
namespace {

std::map<std::string, at::Generator> generators() {
  std::map<std::string, at::Generator> all = {{"cpu", default_generator()}};
  if (at::hasCUDA()) all.emplace("cuda", at::globalContext().defaultGenerator(at::kCUDA));
  return all;
}

}  // namespace

std::map<std::string, at::Tensor> read_random_state() {
  std::map<std::string, at::Tensor> state;
  for (auto& [name, generator] : generators()) {
    const std::scoped_lock lock(generator.mutex());
    state[name] = generator.get_state();
  }
  return state;
}

void write_random_state(const std::map<std::string, at::Tensor>& state) {
  for (auto& [name, generator] : generators()) {
    const auto it = state.find(name);
    if (it == state.end()) continue;
    const std::scoped_lock lock(generator.mutex());
    generator.set_state(it->second);
  }
}

}  // namespace tessera
