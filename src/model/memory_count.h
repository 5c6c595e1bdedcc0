#pragma once

#include <tessera/memory_sample.h>

#include <cstdint>
#include <memory>

#include "model/live_memory.h"
#include "model/sharded_state.h"

namespace tessera {

/// Counts the memory that a sharded model and everything beside it hold, from when the count was
/// made.
class MemoryCount {
 public:
  explicit MemoryCount(const ShardedState& state);

  /// False: `other` is always 0.
  bool knows_other() const { return live_ != nullptr; }

  /// Must be called before the model's memory changes. Returns the bytes held since the last call
  /// of either function, with the peak of `other`.
  MemoryBytes close();
  struct Now {
    MemoryBytes bytes;
    int64_t peak_other;  ///< since the last call of either function
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
  std::unique_ptr<LiveMemory> live_;
  bool keeps_offloaded_;  // on the device
  int64_t start_ = 0;
  Held last_;
};

}  // namespace tessera
