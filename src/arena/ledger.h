#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "memory/shared_memory.h"

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
};

/// The table in shared memory through which the ranks of an arena publish their posts.
///
/// A rank writes its own slots and bell, and increments the bells of other ranks. There are no
/// locks.
class Ledger {
 public:
  static constexpr int kChannels = 3;
  static constexpr int64_t kSlots = 256;  ///< maximum of collectives under way per channel

  /// Makes a ledger for `size` ranks; called by rank 0. Throws `std::system_error`.
  static std::shared_ptr<Ledger> create(int size);
  /// Maps the ledger that rank 0 made; called by the other ranks.
  static std::shared_ptr<Ledger> open(const SharedMemoryHandle& handle, int size);

  PostSlot& slot(int rank, int channel, int64_t sequence) const;
  Bell& bell(int rank) const;
  int size() const { return size_; }
  SharedMemory& memory() const { return *memory_; }

  /// Wakes `rank` or, if it is about to sleep, keeps it from sleeping.
  void ring(int rank) const;
  /// Does the same for all ranks but `rank`.
  void ring_others(int rank) const;

 private:
  struct RankBoard {
    Bell bell;
    std::array<std::array<PostSlot, kSlots>, kChannels> slots;
  };

  Ledger(std::shared_ptr<SharedMemory> memory, int size);
  static size_t nbytes(int size) { return sizeof(RankBoard) * static_cast<size_t>(size); }

  std::shared_ptr<SharedMemory> memory_;
  int size_;
  RankBoard* boards_;
};

/// Sleeps until `bell` rings or `longest` has passed; returns at once if it has rung since `seen`.
/// The caller must read `seen` before it tests its condition, and add itself to `sleepers` before
/// this call.
void sleep_on(Bell& bell, uint32_t seen, std::chrono::milliseconds longest);

}  // namespace tessera
