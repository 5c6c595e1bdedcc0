#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <tessera/base/memory_sample.h>

#include <cstdint>
#include <memory>

#include "base/memory/live_bytes.h"
#include "engine/model/sharded_state.h"

namespace tessera {

/// The bytes of this rank's tensors on a device.
///
/// On the CPU, where ranks are threads, tensors that the calling thread makes count; if the rank is
/// a process of its own, those of all its threads. On another device, those of the whole process.
class LiveMemory {
 public:
  explicit LiveMemory(at::Device device);
  /// False on the CPU if the process has an allocator of its own, and elsewhere if the device's
  /// allocator keeps no statistics. The other functions must not be called then.
  bool is_known() const { return bytes_ || allocator_; }
  /// The bytes now. Only differences between two calls are meaningful.
  int64_t now() const;
  /// The peak since the last call; on a device other than the CPU, the bytes now.
  int64_t take_peak();

 private:
  c10::DeviceIndex index_;
  std::unique_ptr<LiveBytes> bytes_;
  c10::DeviceAllocator* allocator_ = nullptr;
};

/// Returns the bytes that a unit of the model, and its gradients, hold now.
MemoryBytes held_by(const ShardedState& state, size_t unit);

/// Counts the memory that a sharded model and everything beside it hold since its construction.
class MemoryCount {
 public:
  explicit MemoryCount(const ShardedState& state);

  /// False: `other` is always 0.
  bool knows_other() const { return live_.is_known(); }

  /// Must be called before the model's memory changes. Returns the bytes held since the last call
  /// of either function, with the peak of `other`.
  MemoryBytes close();
  struct Now {
    MemoryBytes bytes;
    int64_t peak_other;  ///< since the last call of either function
    int64_t peak_total;  ///< since then
  };
  /// Must be called after the model's memory has changed. Returns the bytes held now.
  Now take();

  /// The part of the bytes that is on the model's device.
  int64_t on_device(const MemoryBytes& bytes) const;

 private:
  struct Held {
    MemoryBytes bytes;
    int64_t live = 0;  // the part of them that the allocator counts
    bool operator==(const Held&) const = default;
  };
  Held model() const;
  int64_t other(int64_t live, int64_t model_live) const { return live - start_ - model_live; }

  const ShardedState& state_;
  LiveMemory live_;
  bool keeps_offloaded_;  // on the device
  int64_t start_ = 0;
  Held last_;
};

}  // namespace tessera
