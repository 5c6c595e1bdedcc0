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

/// A range [begin, end) of a buffer, in bytes.
struct ByteRange {
  size_t begin = 0, end = 0;
};

/// Shared memory of one host into which its ranks gather the shards of several hosts, as seen by
/// one of those ranks.
///
/// The shards of other hosts (`foreign`) are present from a gather until all ranks of the host have
/// released it; then their pages are returned to the system. Counters behind the data, in the same
/// memory, record which ranks have released. The ranks must pass a barrier between the release of
/// one gather and the first byte of the next.
class HostBuffer {
 public:
  /// Returns the bytes of memory needed for `nbytes` of data shared by `ranks` ranks.
  static int64_t nbytes_with_counters(int64_t nbytes, int ranks);

  HostBuffer(std::shared_ptr<SharedMemory> memory, int64_t nbytes, int index, int ranks);

  const std::shared_ptr<SharedMemory>& shared_memory() const { return memory_; }
  /// Returns the offset in bytes of `flat`, which must lie in this memory.
  size_t offset_of(const at::Tensor& flat) const;

  /// Begins a gather, in which `foreign` are the ranges owned by other hosts. Counts the previous
  /// gather as released by this rank.
  void begin_gather(std::vector<ByteRange> foreign);
  /// Declares that this rank has finished reading the last gather. The last rank of the host to do
  /// so returns the pages of `foreign`. Repeated calls have no effect.
  void release();

 private:
  using Counter = std::atomic<int64_t>;

  Counter* counters() const;
  // The last gather whose foreign pages were returned to the system.
  Counter& emptied() const { return counters()[0]; }
  // The last gather that the host's rank `index` has released.
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
