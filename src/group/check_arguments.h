#pragma once

#include <tessera/process_group.h>

namespace tessera {

/// Throws `c10::ValueError` unless `process_group` can issue `collective`. Checks only this rank's
/// arguments: disagreements between ranks are reported when they wait.
void check_arguments(const ProcessGroup& process_group, const Collective& collective);

/// Throws `c10::ValueError` unless `tensor` is in host memory.
void check_on_cpu(const char* function, const at::Tensor& tensor, const CollectiveTag& tag);

/// Throws `c10::ValueError` unless the shard of `call` is empty or is this rank's part of `flat`,
/// which is shared memory.
void check_in_place(const ProcessGroup& process_group, const AllGather& call,
                    const CollectiveTag& tag);

}  // namespace tessera
