#pragma once

#include <tessera/process_group.h>

namespace tessera {

/// Reduces a small tensor of host memory over all ranks, on any process group. Collective; blocks.
void host_all_reduce(ProcessGroup& process_group, const at::Tensor& tensor, ReduceOp op,
                     const CollectiveTag& tag);

}  // namespace tessera
