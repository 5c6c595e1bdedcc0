#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collective.h>

#include <cstdint>
#include <optional>

namespace tessera {

/// Host memory that the ranks of a process group share. It lives as long as a tensor on any rank
/// refers to it.
struct SharedBuffer {
  at::Tensor bytes;  ///< 1-D, of dtype kByte
  /// The same memory mapped read-only at another address; a write to it ends the process.
  at::Tensor read_only;
  /// False if ranks are on several hosts: each host has its own memory, in which `release()` may
  /// leave only the shards of that host's ranks until the next gather.
  bool stays_whole = true;
};

/// A process group whose ranks can share memory.
class SharesMemory {
 public:
  virtual ~SharesMemory() = default;

  /// Makes memory of `nbytes` zeros that all ranks of a host map; returns nothing on all ranks if
  /// one of them can't. A gather into such memory (`flat` lies in its `bytes`, at the same offset
  /// on all ranks, and `shard` in `flat`) copies nothing inside a host: it waits until all ranks
  /// have arrived, and fetches the shards of other hosts. Collective; blocks.
  virtual std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& tag) = 0;

  /// Declares that this rank has finished reading the output of a gather into memory of `share()`.
  /// Call it after waiting for the gather. When all ranks of the host have released, the memory of
  /// the shards of other hosts is returned to the system. The next gather also releases. Never
  /// waits.
  virtual void release(const SharedBuffer& buffer) = 0;
};

}  // namespace tessera
