#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/process_group.h>

#include <vector>

namespace tessera {

// [Note: Memory that does not hold the values]
//
// LibTorch conjugates and negates lazily: a conjugate, and the imaginary part of one, are views of
// the original tensor's memory, and a bit of the view says that its values differ from that memory.
// Operators honor the bits; code that accesses memory directly must check them itself. Process
// groups and checkpoints do so for the tensors that they are given.

/// Returns true if the memory of `tensor` does not hold its values.
inline bool has_math_bits(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_conj() || tensor.is_neg());
}

/// Returns `tensor`, or a copy of it whose memory holds its values.
at::Tensor with_plain_memory(const at::Tensor& tensor);

/// Replaces, by copies, the arguments of a collective whose memory does not hold their values.
class PlainArguments {
 public:
  explicit PlainArguments(Collective& collective);

  /// Returns a work that also copies the outputs from the copies back to the caller's tensors.
  WorkPtr finish(WorkPtr work) &&;

  struct Output {
    at::Tensor target, plain;
  };

 private:
  static void replace_input(at::Tensor& tensor);
  void replace_output(at::Tensor& tensor);

  void replace(AllGather& call);
  void replace(ReduceScatter& call);
  void replace(AllReduce& call);
  void replace(Broadcast& call);
  void replace(AllToAll& call);
  void replace(Barrier& /*call*/) {}

  std::vector<Output> outputs_;
};

}  // namespace tessera
