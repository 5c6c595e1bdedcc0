#pragma once

#include <tessera/process_group.h>

namespace tessera {

/// Throws `c10::ValueError` unless `process_group` can issue `collective`. It looks at this rank's
/// arguments alone: ranks that disagree with each other find out when they wait.
void check_arguments(const ProcessGroup& process_group, const Collective& collective);

/// Throws unless `tensor` lies in host memory.
void check_on_cpu(const char* function, const at::Tensor& tensor, const CollectiveTag& tag);

/// Throws unless the shard of `call` is the part of `flat`, which is shared memory, that this rank
/// owns.
void check_in_place(const ProcessGroup& process_group, const AllGather& call,
                    const CollectiveTag& tag);

}  // namespace tessera
