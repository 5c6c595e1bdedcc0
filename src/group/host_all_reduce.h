#pragma once

#include <tessera/process_group.h>

namespace tessera {

/// All-reduces a small tensor in host memory, on any process group. Collective; blocks.
inline void host_all_reduce(ProcessGroup& process_group, const at::Tensor& tensor, ReduceOp op,
                            const CollectiveTag& tag) {
  if (process_group.size() == 1) return;
  if (process_group.backend_name() != "nccl")
    return process_group.all_reduce(tensor, op, tag)->wait();
  const at::Tensor on_device = tensor.to(at::kCUDA);
  process_group.all_reduce(on_device, op, tag)->wait();
  tensor.copy_(on_device);
}

}  // namespace tessera
