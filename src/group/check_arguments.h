#pragma once

#include <tessera/process_group.h>

#include <span>
#include <vector>

namespace tessera {

/// What every process group demands of its arguments; throw `c10::ValueError`. Each check depends
/// on this rank's arguments alone: ranks that disagree with each other are found by the wait. What
/// passes is counted for `CommDebug`: all process groups ask here before they issue.
void check_all_gather(const ProcessGroup& process_group, const at::Tensor& flat,
                      const at::Tensor& shard, std::span<const int64_t> bounds,
                      const CollectiveTag& tag);
void check_reduce_scatter(const ProcessGroup& process_group, const at::Tensor& out,
                          std::span<const Piece> pieces, std::span<const int64_t> bounds,
                          const ReduceScatterOptions& options, const CollectiveTag& tag);
void check_all_reduce(const ProcessGroup& process_group, const at::Tensor& tensor,
                      const CollectiveTag& tag);
void check_broadcast(const ProcessGroup& process_group, const at::Tensor& tensor, int root,
                     const CollectiveTag& tag);
void check_all_to_all(const ProcessGroup& process_group, std::span<const at::Tensor> from,
                      std::span<const at::Tensor> to, const CollectiveTag& tag);

/// Throws unless `tensor` lies in host memory.
void check_on_cpu(const char* function, const at::Tensor& tensor, const CollectiveTag& tag);

/// The same, for process groups of tensors in host memory.
void check_host_all_gather(const ProcessGroup& process_group, const at::Tensor& flat,
                           const at::Tensor& shard, std::span<const int64_t> bounds,
                           const CollectiveTag& tag);
/// Returns the dtype of the pieces.
at::ScalarType check_host_reduce_scatter(const ProcessGroup& process_group, const at::Tensor& out,
                                         std::span<const Piece> pieces,
                                         std::span<const int64_t> bounds,
                                         const ReduceScatterOptions& options,
                                         const CollectiveTag& tag);
void check_host_all_reduce(const ProcessGroup& process_group, const at::Tensor& tensor, ReduceOp op,
                           const CollectiveTag& tag);
void check_host_broadcast(const ProcessGroup& process_group, const at::Tensor& tensor, int root,
                          const CollectiveTag& tag);
void check_host_all_to_all(const ProcessGroup& process_group, std::span<const at::Tensor> from,
                           std::span<const at::Tensor> to, const CollectiveTag& tag);

/// Throws unless `shard` is the part of `flat`, which is shared memory, that this rank owns.
void check_in_place(const ProcessGroup& process_group, const at::Tensor& flat,
                    const at::Tensor& shard, std::span<const int64_t> bounds,
                    const CollectiveTag& tag);

/// Bounds that split `numel` elements as evenly as possible over `size` ranks.
std::vector<int64_t> even_bounds(int64_t numel, int size);

/// Bytes of an element that a reduce-scatter sends.
inline int64_t message_item_size(const at::Tensor& out, const ReduceScatterOptions& options) {
  return static_cast<int64_t>(c10::elementSize(options.dtype.value_or(out.scalar_type())));
}

}  // namespace tessera
