#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace tessera::testing::sim {

/// The allocator of pinned host memory. Freed memory is poisoned and returned once the copies that
/// use it have run.
at::HostAllocator& pinned_allocator();

bool is_pinned(const void* address);

}  // namespace tessera::testing::sim
