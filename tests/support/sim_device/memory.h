#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include "support/sim_device/sim_device.h"

namespace tessera::testing::sim {

/// The allocator of all devices, like LibTorch's caching one for CUDA.
///
/// A block belongs to the stream that was current when it was allocated. A freed one is filled with
/// kPoison in the order of that stream, and is what the stream's next allocation of this size class
/// gets. If record_stream() has named other streams, it waits for what they had queued when the
/// block was freed.
c10::DeviceAllocator& device_allocator();

/// The address at which kernels reach the device's byte at `address`.
void* alias_of(const void* address);
/// The device whose memory this is; -1 for other memory.
int device_of_address(const void* address);

MemoryCount memory_count(int device);
void reset_peak_of(int device);
/// The most that a device can have, which is its address space.
constexpr int64_t kNoLimit = int64_t{16} << 30;
void set_limit_of(int device, int64_t bytes);

}  // namespace tessera::testing::sim
