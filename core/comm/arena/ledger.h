#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/memory/shared_memory.h"

namespace tessera {

/// A rank's part of one collective, as the other ranks see it. Collectives are counted from 1 here;
/// 0 means none yet.
struct alignas(64) PostSlot {
  std::atomic<uint32_t> shown{0};  ///< the collective to which `address` belongs
  std::atomic<uint32_t> read{0};   ///< the last collective that this rank has finished reading
  uint64_t address = 0;            ///< of a `Post`, in this rank's memory
};

/// An event count that wakes a sleeping rank.
struct alignas(64) Bell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleepers{0};
  std::atomic<uint32_t> closed{0};  ///< nonzero once the rank has left the arena

  /// Wakes the rank or, if it is about to sleep, keeps it from sleeping.
  void ring();
  /// Sleeps until the bell rings or `longest` has passed; returns at once if it has rung since
  /// `seen`. The caller must read `seen` before it tests its condition.
  void sleep(uint32_t seen, std::chrono::milliseconds longest);
};

/// The table in shared memory through which the ranks of an arena publish their posts.
///
/// A rank writes its own slots and bell, and increments the bells of other ranks. There are no
/// locks.
class Ledger {
 public:
  static constexpr int kChannels = 3;
  static constexpr int64_t kSlots = 256;  ///< maximum of collectives under way per channel

  static size_t nbytes(int size) { return sizeof(RankBoard) * static_cast<size_t>(size); }
  /// `memory`: the `nbytes(size)` bytes, all zero at first, that all ranks map.
  Ledger(std::shared_ptr<SharedMemory> memory, int size)
      : memory_(std::move(memory)),
        size_(size),
        boards_(reinterpret_cast<RankBoard*>(memory_->data())) {}

  int size() const { return size_; }
  Bell& bell(int rank) const { return boards_[rank].bell; }
  PostSlot& slot(int rank, int channel, int64_t sequence) const {
    return boards_[rank].slots[channel][sequence % kSlots];
  }
  /// Rings the bells of all ranks but `rank`.
  void ring_others(int rank) const;

 private:
  struct RankBoard {
    Bell bell;
    std::array<std::array<PostSlot, kSlots>, kChannels> slots;
  };

  std::shared_ptr<SharedMemory> memory_;
  int size_;
  RankBoard* boards_;
};

}  // namespace tessera
