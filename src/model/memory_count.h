#pragma once

#include <tessera/memory_sample.h>

#include <cstdint>
#include <memory>

#include "model/live_memory.h"
#include "model/sharded_state.h"

namespace tessera {

/// Counts what a sharded model and everything beside it hold, from when it was made.
class MemoryCount {
 public:
  explicit MemoryCount(const ShardedState& state);

  /// False: `other` is 0 always.
  bool knows_other() const { return live_ != nullptr; }

  /// To be called before the model's memory changes. What was held since the last call of either
  /// function, with the most that there was of `other`.
  MemoryBytes close();
  struct Now {
    MemoryBytes bytes;
    int64_t peak_other;  ///< since the last call of either function
  };
  /// To be called after the model's memory has changed.
  Now take();

  /// Those of the bytes that lie on the model's device.
  int64_t on_device(const MemoryBytes& bytes) const;

 private:
  struct Held {
    MemoryBytes bytes;
    int64_t live = 0;  // those of them that are among the live bytes
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
