#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collective.h>

#include <cstdint>
#include <optional>

namespace tessera {

/// Host memory that the ranks of a process group have in common. It lives as long as a tensor on
/// any rank shows it.
struct SharedBuffer {
  at::Tensor bytes;  ///< 1-D, of dtype kByte
  /// The same memory at another address, where writing to it ends the process.
  at::Tensor read_only;
  /// False on several hosts: each has such memory of its own, in which `release()` may leave only
  /// the shards of its own ranks, until the next gather.
  bool stays_whole = true;
};

/// A process group whose ranks can have memory in common.
class SharesMemory {
 public:
  virtual ~SharesMemory() = default;

  /// Makes memory of `nbytes` zeros that all ranks of a host see; nothing on all ranks if one can't.
  /// A gather into such memory (`flat` lying in `bytes` of it, on all ranks at one place, and
  /// `shard` in `flat`) copies nothing inside a host: it waits until all ranks have come, and
  /// fetches the shards of other hosts. Collective; blocks.
  virtual std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& tag) = 0;

  /// After a gather into memory of `share()` was waited for: this rank has read its output. When all
  /// ranks of the host have said so, the memory of the shards of other hosts is given back. The next
  /// gather says it as well. Never waits.
  virtual void release(const SharedBuffer& buffer) = 0;
};

}  // namespace tessera
