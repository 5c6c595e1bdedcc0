#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/shared_memory.h"

namespace tessera {

/// A range of bytes of a buffer.
struct ByteRange {
  size_t begin = 0, end = 0;
};

/// Memory of one host in which its ranks gather what ranks of several hosts own, as one of those
/// ranks has it.
///
/// What other hosts own (`foreign`) is there from a gather until all ranks have released it; then
/// its pages go back to the system. Counters behind the data, in the same memory, tell who has. The
/// ranks must have met between the release of one gather and the first byte of the next.
class HostBuffer {
 public:
  /// Of the memory for `nbytes` of data, shared by `ranks`.
  static int64_t nbytes_with_counters(int64_t nbytes, int ranks);

  HostBuffer(std::shared_ptr<SharedMemory> memory, int64_t nbytes, int index, int ranks);

  const std::shared_ptr<SharedMemory>& shared_memory() const { return memory_; }
  /// Where `flat`, which lies in it, begins.
  size_t offset_of(const at::Tensor& flat) const;

  /// A gather begins. What the one before it brought counts as released by this rank.
  void begin_gather(std::vector<ByteRange> foreign);
  /// This rank reads no more what the last gather brought. May be called again.
  void release();

 private:
  using Counter = std::atomic<int64_t>;

  Counter* counters() const;
  // The last gather whose pages were given back.
  Counter& emptied() const { return counters()[0]; }
  // The last gather that a rank of the host has released.
  Counter& released(int index) const { return counters()[1 + index]; }

  const std::shared_ptr<SharedMemory> memory_;
  const int64_t nbytes_;
  const int index_;
  const int ranks_;
  std::mutex mutex_;
  int64_t gathers_ = 0;  // equal on all ranks, as gathers are collective
  std::vector<ByteRange> foreign_;
};

}  // namespace tessera
