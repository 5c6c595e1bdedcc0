#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>

#include "tensor/op_plan.h"

namespace tessera {

/// Returns a digest of a call and of its plan: equal on all ranks that chose the same plan.
uint64_t digest_of(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
                   const std::optional<OpPlan>& plan);

/// Adds a call to this thread's digest, which `operator_digest()` returns.
void note_call(uint64_t digest);

/// Takes the operators called in its life out of this thread's digest: those into which another
/// one is decomposed, which only ranks of the mesh call.
class DecomposedDigest {
 public:
  DecomposedDigest();
  /// Adds the decomposed operator, by its results on `stack`.
  void note(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const;

 private:
  const uint64_t before_;
};

}  // namespace tessera
