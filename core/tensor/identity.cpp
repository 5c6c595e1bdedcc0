#include "tensor/identity.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <unordered_map>

#include "base/dispatch/each_tensor.h"
#include "base/dispatch/mixed_hash.h"

namespace tessera {
namespace {

thread_local uint64_t current = 0;
thread_local uint64_t made = 0;  // tensors with identities of the current one

uint64_t hash_of(std::string_view text) { return std::hash<std::string_view>()(text); }

// The number that a program wrote, as a tensor; 0 for other tensors.
uint64_t number_in(const at::Tensor& tensor) {
  const bool is_number = tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (!is_number || !tensor.is_cpu()) return 0;
  uint64_t number = 0;
  std::memcpy(&number, tensor.const_data_ptr(), std::min(sizeof number, tensor.nbytes()));
  return number;
}

uint64_t identity_of(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  const c10::FunctionSchema& schema = op.schema();
  uint64_t hash = mixed_hash(hash_of(schema.name()), hash_of(schema.overload_name()));
  for (const c10::IValue& argument : arguments) {
    if (argument.isInt()) hash = mixed_hash(hash, static_cast<uint64_t>(argument.toInt()));
    if (argument.isDouble()) hash = mixed_hash(hash, std::bit_cast<uint64_t>(argument.toDouble()));
    each_tensor(argument, [&](const at::Tensor& tensor) {
      const DistMeta* const meta = find_dist_meta(tensor);
      hash = mixed_hash(hash, meta ? meta->identity : number_in(tensor));
    });
  }
  return hash | 1;
}

}  // namespace

IdentityScope::IdentityScope(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments)
    : IdentityScope(identity_of(op, arguments)) {}

IdentityScope::IdentityScope(uint64_t identity) : before_(current), made_before_(made) {
  current = identity;
  made = 0;
}

IdentityScope::~IdentityScope() {
  current = before_;
  made = made_before_;
}

uint64_t scope_identity() { return current; }

uint64_t next_identity(const DistSpec& spec, const DistParameter* parameter) {
  if (parameter && !parameter->name.empty()) return hash_of(parameter->name) | 1;
  if (current) return mixed_hash(current, made++) | 1;
  uint64_t mesh = 0;
  for (const int64_t size : spec.mesh.shape()) mesh = mixed_hash(mesh, static_cast<uint64_t>(size));
  for (const int rank : spec.mesh.ranks()) mesh = mixed_hash(mesh, static_cast<uint64_t>(rank));
  thread_local std::unordered_map<uint64_t, uint64_t> made_on;
  return mixed_hash(mesh, ++made_on[mesh]) | 1;
}

}  // namespace tessera
