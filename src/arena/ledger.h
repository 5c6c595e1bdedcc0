#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "memory/shared_memory.h"

namespace tessera {

/// A rank's part of one collective, as the other ranks see it. Numbers are counted from 1 here, so
/// that 0 is before the first.
struct alignas(64) PostSlot {
  std::atomic<uint32_t> shown{0};    ///< the collective that `address` belongs to
  std::atomic<uint32_t> read{0};     ///< the last one of which this rank has read all posts
  uint64_t address = 0;              ///< of a `Post`, in the memory of this rank
};

/// Wakes a rank that sleeps: an event count.
struct alignas(64) Bell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleepers{0};
  std::atomic<uint32_t> closed{0};  ///< the rank takes part no more
};

/// The board in shared memory on which the ranks of an arena show each other what they have.
///
/// A rank writes its own slots and bell and counts up the others'; nothing is locked.
class Ledger {
 public:
  static constexpr int kChannels = 3;
  static constexpr int64_t kSlots = 256;  ///< collectives of a channel that may be under way

  /// Of rank 0. Throws `std::system_error`.
  static std::shared_ptr<Ledger> create(int size);
  /// Of the others.
  static std::shared_ptr<Ledger> open(const SharedMemoryHandle& handle, int size);

  PostSlot& slot(int rank, int channel, int64_t sequence) const;
  Bell& bell(int rank) const;
  int size() const { return size_; }
  SharedMemory& memory() const { return *memory_; }

  /// Wakes `rank`, or lets it find, before it sleeps, that something happened.
  void ring(int rank) const;
  /// Wakes all ranks but `rank`, or lets them find, before they sleep, that something happened.
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

/// Sleeps until `bell` rings or `longest` has passed, unless it has rung since `seen`. The calling
/// rank must have counted itself among the sleepers before it looked for what it waits for.
void sleep_on(Bell& bell, uint32_t seen, std::chrono::milliseconds longest);

}  // namespace tessera
