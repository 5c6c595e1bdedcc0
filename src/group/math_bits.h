#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/process_group.h>

#include <vector>

namespace tessera {

// [Note: Memory that does not hold the values]
//
// LibTorch conjugates and negates lazily: a conjugate, and the imaginary part of one, are views
// whose memory is that of the tensor they were made of, and a bit of the view says that its values
// are others. Operators ask for the bits; code that reads or writes memory by itself has to.
// Process groups and checkpoints do so where tensors come to them.

/// True if the memory of `tensor` does not hold its values.
inline bool has_math_bits(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_conj() || tensor.is_neg());
}

/// `tensor`, or a copy of it whose memory holds the values.
at::Tensor with_plain_memory(const at::Tensor& tensor);

/// Replaces the arguments of a collective whose memory does not hold their values by copies.
class PlainArguments {
 public:
  explicit PlainArguments(Collective& collective);

  /// Makes a work that brings the outputs from the copies to the tensors that were given.
  WorkPtr finish(WorkPtr work) &&;

  struct Output {
    at::Tensor target, plain;
  };

 private:
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
