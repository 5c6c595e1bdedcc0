#include "tensor/operator_digest.h"

#include <tessera/tensor/dist_debug.h>

#include <functional>
#include <string>
#include <utility>
#include <variant>

#include "base/dispatch/each_tensor.h"
#include "base/dispatch/mixed_hash.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

thread_local uint64_t of_thread = 0;

class Digest {
 public:
  explicit Digest(const c10::OperatorHandle& op) {
    add(std::hash<c10::OperatorName>()(op.operator_name()));
  }

  void add(uint64_t value) { value_ = mixed_hash(value_, value); }
  void add(at::IntArrayRef values) {
    for (const int64_t value : values) add(static_cast<uint64_t>(value));
  }
  void add(const DistSpec& spec) {
    add(spec.mesh.shape());
    for (const Placement& placement : spec.placements) {
      add(placement.index());
      if (const auto* const shard = std::get_if<Shard>(&placement))
        add(at::IntArrayRef({shard->dim, shard->split_factor}));
      if (const auto* const partial = std::get_if<Partial>(&placement))
        add(static_cast<uint64_t>(partial->op));
    }
  }
  void add(at::ArrayRef<c10::IValue> values) {
    for (const c10::IValue& value : values)
      each_tensor(value, [&](const at::Tensor& tensor) {
        add(tensor.sizes());
        if (const DistMeta* const meta = find_dist_meta(tensor)) add(*meta->spec);
      });
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

}  // namespace

uint64_t digest_of(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
                   const std::optional<OpPlan>& plan) {
  Digest digest(op);
  digest.add(arguments);
  if (!plan) return digest.value();
  for (const DistSpecPtr& input : plan->inputs) digest.add(*input);
  for (const OpPlan::Output& output : plan->outputs) {
    digest.add(*output.spec);
    digest.add(output.sizes);
    // Strides of dims of one element are any: kernels, and their functions on meta, differ.
    for (size_t d = 0; d < output.sizes.size(); ++d)
      digest.add(output.sizes[d] == 1 ? 0 : static_cast<uint64_t>(output.strides[d]));
  }
  return digest.value();
}

void note_call(uint64_t digest) { of_thread = mixed_hash(of_thread, digest); }

DecomposedDigest::DecomposedDigest() : before_(of_thread) {}

void DecomposedDigest::note(const c10::OperatorHandle& op, const torch::jit::Stack& stack) const {
  Digest digest(op);
  digest.add(torch::jit::last(stack, op.schema().returns().size()));
  of_thread = before_;
  note_call(digest.value());
}

uint64_t operator_digest() { return std::exchange(of_thread, 0); }

}  // namespace tessera
