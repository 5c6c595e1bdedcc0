#pragma once

#include <cstdint>

namespace tessera::tools {

/// Returns how many processes the kernel has killed for lack of memory, in this process's control
/// group if it counts them, else on this host. -1: unknown.
int64_t memory_kills();

}  // namespace tessera::tools
