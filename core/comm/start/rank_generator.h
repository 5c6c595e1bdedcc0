#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/function_schema.h>
#include <c10/core/DispatchKey.h>

namespace tessera {

/// The dispatch key that is included on the threads of spawned ranks. LibTorch uses it only in its
/// own tests. See [Note: Generators of ranks] in start/rank_generator.cpp.
constexpr c10::DispatchKey kRankKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

/// Makes operators draw from the rank's generator where `kRankKey` is included. Must be called
/// before.
void register_rank_generator();

/// Returns whether an operator's argument is the generator to draw from.
bool is_generator(const c10::Argument& argument);

/// Returns a new generator in the same state.
at::Generator copy_of(at::Generator generator);

/// Gives LibTorch's default generator, while this object lives, a seed that no program chooses: any
/// other seed shows that the program seeded it.
class GeneratorSeal {
 public:
  GeneratorSeal();
  ~GeneratorSeal();
  GeneratorSeal(const GeneratorSeal&) = delete;
  GeneratorSeal& operator=(const GeneratorSeal&) = delete;

  /// Returns the generator in its earlier state. The destructor restores that.
  const at::Generator& before() const { return before_; }
  uint64_t seed() const { return seed_; }

 private:
  at::Generator before_;
  uint64_t seed_;
};

}  // namespace tessera
