#pragma once

#include <tessera/comm/process_group.h>

namespace tessera {

/// Reduces `tensor` over all ranks, in place, and waits. Collective, but for a process group of one
/// rank, in which it does nothing.
inline void blocking_all_reduce(ProcessGroup& process_group, const at::Tensor& tensor, ReduceOp op,
                                const CollectiveTag& tag) {
  if (process_group.size() > 1) process_group.all_reduce(tensor, op, tag)->wait();
}

}  // namespace tessera
