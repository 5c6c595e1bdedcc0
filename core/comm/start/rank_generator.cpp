#include "comm/start/rank_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <tessera/base/generator.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "base/device/device.h"
#include "comm/start/spawned_rank.h"

namespace tessera {

// [Note: Generators of ranks]
//
// Operators that are given no generator draw from LibTorch's default one, of which a process has
// one. Ranks that are threads would draw from it in an order that the scheduler decides. So each
// has its own, and a dispatch key, included on its thread, redirects operators to it: kernels for
// that key are registered for the operators with a generator argument alone; all others fall
// through, at no cost. The kernel passes the rank's generator if none, or the default one, is
// given. Operators without such an argument (dropout) call one that has it, and are caught there.
//
// Only if all tensors are on the CPU: the generators of other devices stay. Operators that make a
// tensor (randn) have no tensor yet that shows the device; they, too, call one that has it
// (normal_).
//
// The key precedes all keys that change which kernel runs (autograd, autocast, that of deferred
// init), so they see the generator as if the program had named it.
namespace {

void check_seal(const SpawnedRank& rank) {
  at::Generator shared = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(shared.mutex());
  TORCH_CHECK(shared.current_seed() == rank.world().sealed_seed,
              "[spawn] LibTorch's default generator was seeded with ", shared.current_seed(),
              " while ranks ran as threads, which do not draw from it; expected "
              "tessera::manual_seed() in place of torch::manual_seed()");
}

void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  constexpr c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, kRankKey);
  SpawnedRank* rank = SpawnedRank::current();
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; rank && i < arguments.size(); ++i) {
    if (!is_generator(arguments[i])) continue;
    c10::IValue& generator = (*stack)[stack->size() - arguments.size() + i];
    const bool is_default =
        !generator.isGenerator() || generator.toGenerator() == at::detail::getDefaultCPUGenerator();
    if (is_default && keys.highestBackendKey() == c10::BackendComponent::CPUBit) {
      check_seal(*rank);
      generator = rank->generator();
    }
  }
  op.redispatchBoxed(keys & below, stack);
}

bool draws(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), is_generator);
}

}  // namespace

bool is_generator(const c10::Argument& argument) {
  c10::TypePtr type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

at::Generator copy_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.clone();
}

void register_rank_generator() {
  // Kept to the end of the process: operators may run while static variables are destroyed. "Used",
  // so that the compiler keeps the pointers, through which leak checkers find the objects.
  [[gnu::used]] static const auto* const fallback = [] {
    auto* library = new torch::Library(torch::Library::IMPL, "_", kRankKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFallthrough());
    return library;
  }();
  [[gnu::used]] static const auto* const kernels = [] {
    auto* library = new torch::Library(torch::Library::IMPL, "aten", kRankKey, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op || !name.name.starts_with("aten::") || !draws(*op)) continue;
      const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
      library->impl((name.name + overload).c_str(),
                    torch::CppFunction::makeFromBoxedFunction<&draw>());
    }
    return library;
  }();
}

GeneratorSeal::GeneratorSeal() : before_(copy_of(at::detail::getDefaultCPUGenerator())) {
  at::Generator shared = at::detail::getDefaultCPUGenerator();
  seed_ = ~before_.current_seed();
  const std::lock_guard lock(shared.mutex());
  shared.set_current_seed(seed_);
}

GeneratorSeal::~GeneratorSeal() {
  at::Generator shared = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(shared.mutex());
  shared.set_state(before_.get_state());
}

void manual_seed(uint64_t seed) {
  SpawnedRank* rank = SpawnedRank::current();
  if (!rank) return at::manual_seed(seed);
  const auto set_seed = [&](at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  };
  set_seed(rank->generator());
  if (const auto type = accelerator()) set_seed(default_generator_of(with_index(*type)));
}

at::Generator default_generator() {
  SpawnedRank* rank = SpawnedRank::current();
  return rank ? rank->generator() : at::detail::getDefaultCPUGenerator();
}

}  // namespace tessera
