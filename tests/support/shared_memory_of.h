#pragma once

#include "comm/group/capability.h"

namespace tessera::testing {

/// The shared memory of a process group that has some.
inline SharesMemory& shared_memory_of(ProcessGroup& process_group) {
  auto* const memory = capability<SharesMemory>(process_group);
  TORCH_CHECK(memory, "the ranks of this process group share no memory");
  return *memory;
}

}  // namespace tessera::testing
