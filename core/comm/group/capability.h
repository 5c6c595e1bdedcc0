#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/process_group.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>

namespace tessera {

/// Returns the transport behind any decorators of `process_group` as a `T`, or null if it is none.
/// `T` is an interface that only some transports implement: one of those below.
template <class T>
T* capability(ProcessGroup& process_group) {
  return dynamic_cast<T*>(&process_group.transport());
}

/// A process group whose connections are closed by its world, even if the process group is still
/// referenced: threads and sockets must not outlive the world because a model does.
class Closable {
 public:
  virtual ~Closable() = default;

  /// Closes the connections; collectives issued later throw. Waits up to `closing_grace()` for
  /// messages that are still being sent to peers. May be called again.
  virtual void close() noexcept = 0;
};

/// Returns how long `close()` waits: at most `timeout`, and not at all while an exception unwinds
/// the stack.
inline std::chrono::milliseconds closing_grace(std::chrono::milliseconds timeout) {
  if (std::uncaught_exceptions() > 0) return std::chrono::milliseconds(0);
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::seconds(2));
}

/// Closes `process_group` if its transport is `Closable`.
inline void close(const ProcessGroupPtr& process_group) noexcept {
  if (auto* const closable = capability<Closable>(*process_group)) closable->close();
}

/// A process group whose collectives run on devices, where they wait for other ranks without end.
class Abortable {
 public:
  virtual ~Abortable() = default;

  /// Ends the collectives that wait for other ranks; later ones fail. May be called again.
  virtual void abort() noexcept = 0;
};

/// A world's process group that makes process groups of a subset of its ranks locally, without
/// communication.
class MakesParts {
 public:
  virtual ~MakesParts() = default;

  /// Makes a process group of `size` ranks, in which this process is `rank`.
  virtual ProcessGroupPtr make_part(int rank, int size) const = 0;
};

/// The messages that a rank has sent so far.
struct SentMessages {
  int64_t count = 0;
  int64_t nbytes = 0;
};

/// A process group that counts the messages that it actually sends, as opposed to the bytes that a
/// collective should take.
class SendsMessages {
 public:
  virtual ~SendsMessages() = default;

  virtual SentMessages sent() const = 0;
};

/// A process group whose time is computed and not spent, as that of a job that is only planned.
class HasClock {
 public:
  virtual ~HasClock() = default;

  virtual std::chrono::steady_clock::time_point now() const = 0;
  /// Lets time pass until the oldest reduction is over, but at most so long.
  virtual void sleep_for(std::chrono::steady_clock::duration longest) = 0;
};

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
