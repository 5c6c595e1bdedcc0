#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "support/sim_device/sim_device.h"

namespace tessera::testing::sim {

/// The allocator of all devices, like LibTorch's caching one for CUDA.
///
/// A block belongs to the stream that was current when it was allocated. A freed one is filled with
/// kPoison in the order of that stream, and given to the stream's next allocation of this size
/// class. If record_stream() has named other streams, it first waits for the operations that they
/// had queued when the block was freed.
c10::DeviceAllocator& device_allocator();

/// The allocator of pinned host memory. Freed memory is poisoned and returned once the copies that
/// use it have run.
at::HostAllocator& pinned_allocator();
bool is_pinned(const void* address);

/// The address at which kernels reach the device's byte at `address`.
void* alias_of(const void* address);
/// The device whose memory this is; -1 for other memory.
int device_of_address(const void* address);

/// The most that a device can have, which is its address space.
constexpr int64_t kNoLimit = int64_t{16} << 30;

}  // namespace tessera::testing::sim
