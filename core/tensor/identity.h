#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "tensor/dist_meta.h"

namespace tessera {

// [Note: Identities]
//
// Ranks compare what they are about to exchange: operator, sizes, placements, the name of a
// parameter. Two activations may be alike in all of these, and a rank that exchanges them in
// another order would get the values of the wrong one. So each DistTensor has an identity, which
// ranks compare, too: a hash of the operator that made it, its numbers and the identities of its
// tensors. It does not depend on what else a rank computes. A parameter's identity is a hash of its
// name. Other tensors that no operator made, such as those of from_local(), are numbered, by thread
// and mesh. A write changes the identity of all but parameters, by the operator that writes.
//
// A rank that is not in the mesh may have made fewer tensors, so identities are not compared where
// a tensor moves to another mesh; there it gets a new one.

/// While it lives, DistTensors that this thread makes have identities derived from that of an
/// operator or of a tensor.
class IdentityScope {
 public:
  IdentityScope(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments);
  explicit IdentityScope(uint64_t identity);
  ~IdentityScope();
  IdentityScope(const IdentityScope&) = delete;
  IdentityScope& operator=(const IdentityScope&) = delete;

 private:
  const uint64_t before_, made_before_;
};

/// Returns the identity of the scope, 0 without one.
uint64_t scope_identity();

/// Returns the identity of a DistTensor that this thread is about to make.
uint64_t next_identity(const DistSpec& spec, const DistParameter* parameter);

/// What a conversion is for, in errors, and the identity of its tensor, that of the scope if left
/// out.
struct Subject {
  Subject(std::string_view name, uint64_t of = scope_identity()) : text(name), identity(of) {}
  Subject(const std::string& name) : Subject(std::string_view(name)) {}
  Subject(const char* name) : Subject(std::string_view(name)) {}

  std::string_view text;
  uint64_t identity;
};

}  // namespace tessera
