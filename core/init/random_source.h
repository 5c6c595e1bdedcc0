#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera {

/// Intercepts, on one thread, the operators that draw random numbers.
///
/// While an object lives, the fallback passes it every operator, including those that operators
/// call: `randn` names no generator, but the `normal_` inside it does.
class RandomSource {
 public:
  /// Watches: `before_draws()` is a copy of the generator as the first operator found it.
  RandomSource();
  /// Replays: operators draw from a copy of `start` instead of the generator they were given.
  explicit RandomSource(const at::Generator& start);
  ~RandomSource();
  RandomSource(const RandomSource&) = delete;
  RandomSource& operator=(const RandomSource&) = delete;

  /// Returns the thread's innermost object, or null.
  static RandomSource* current();

  /// Must be called before each operator, with its arguments on top of the stack.
  void serve(const c10::FunctionSchema& schema, torch::jit::Stack& stack);

  /// Undefined if nothing was drawn.
  const at::Generator& before_draws() const { return before_draws_; }

 private:
  explicit RandomSource(c10::DispatchKeySet excluded);

  RandomSource* outer_;
  c10::impl::ForceDispatchKeyGuard seen_;
  at::Generator before_draws_;
  at::Generator replay_;
};

}  // namespace tessera
