#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/function_schema.h>
#include <c10/core/DispatchKey.h>

namespace tessera {

/// The dispatch key that is included on the threads of spawned ranks. LibTorch has it for its own
/// tests. See [Note: Generators of ranks] in start/rank_generator.cpp.
constexpr c10::DispatchKey kRankKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// Has operators draw from the rank's generator where `kRankKey` is included. To be called before.
void register_rank_generator();

/// Whether an operator's argument is the generator to draw from.
bool is_generator(const c10::Argument& argument);

/// A generator of its own in the same state.
at::Generator copy_of(at::Generator generator);

/// Gives LibTorch's default generator, while it lives, a seed that nobody chooses: any other seed
/// tells that somebody seeded it.
class GeneratorSeal {
 public:
  GeneratorSeal();
  ~GeneratorSeal();
  GeneratorSeal(const GeneratorSeal&) = delete;
  GeneratorSeal& operator=(const GeneratorSeal&) = delete;

  /// The generator as it was before, and will be.
  const at::Generator& before() const { return before_; }
  uint64_t seed() const { return seed_; }

 private:
  at::Generator before_;
  uint64_t seed_;
};

}  // namespace tessera
