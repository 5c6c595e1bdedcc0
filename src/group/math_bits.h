#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/process_group.h>

#include <span>
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

/// A collective of `process_group` on copies of its arguments whose memory holds their values,
/// which the work brings back to those that are written to; null if no argument needs that. Process
/// groups that read or write memory ask these first.
WorkPtr plain_all_gather(ProcessGroup& process_group, const at::Tensor& flat,
                         const at::Tensor& shard, std::span<const int64_t> bounds,
                         const CollectiveTag& tag);
WorkPtr plain_reduce_scatter(ProcessGroup& process_group, const at::Tensor& out,
                             const std::vector<Piece>& pieces, std::span<const int64_t> bounds,
                             const ReduceScatterOptions& options, const CollectiveTag& tag);
WorkPtr plain_all_reduce(ProcessGroup& process_group, const at::Tensor& tensor, ReduceOp op,
                         const CollectiveTag& tag);
WorkPtr plain_broadcast(ProcessGroup& process_group, const at::Tensor& tensor, int root,
                        const CollectiveTag& tag);
WorkPtr plain_all_to_all(ProcessGroup& process_group, const std::vector<at::Tensor>& from,
                         const std::vector<at::Tensor>& to, const CollectiveTag& tag);

}  // namespace tessera
