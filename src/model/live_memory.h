#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace tessera {

/// The bytes of this rank's tensors on a device.
class LiveMemory {
 public:
  virtual ~LiveMemory() = default;
  /// The bytes now. Only differences between two calls are meaningful.
  virtual int64_t now() = 0;
  /// The peak since the last call; on a device other than the CPU, the bytes now.
  virtual int64_t take_peak() = 0;
};

/// Null where the bytes are unknown: on the CPU, if the process has an allocator of its own;
/// elsewhere, if the device's allocator keeps no statistics.
///
/// On the CPU, where ranks are threads, tensors that the calling thread makes count; if the rank is
/// a process of its own, those of all its threads. On another device, those of the whole process.
std::unique_ptr<LiveMemory> live_memory(at::Device device);

}  // namespace tessera
