#pragma once

#include <tessera/process_group.h>

namespace tessera {

/// All-reduces a small tensor in host memory, on any process group. Collective; blocks.
void host_all_reduce(ProcessGroup& process_group, const at::Tensor& tensor, ReduceOp op,
                     const CollectiveTag& tag);

}  // namespace tessera
