#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <mutex>

namespace tessera {

/// A device's stream beside those on which its kernels are queued. Not for the host.
///
/// Memory that work on it takes from the device's allocator belongs to it: it is reused in its
/// order, as a temporary of a function should be. Memory of another stream that it reads or writes
/// must be kept until that stream has waited for the work's event.
class SideStream {
 public:
  explicit SideStream(c10::Device device);

  /// Calls `queue`, whose work is queued here: behind all work that was queued before on the
  /// current stream. Returns an event after it. The host does not wait.
  c10::Event run(const std::function<void()>& queue) const;

 private:
  const c10::Stream stream_;
};

/// A side stream for each device that is asked for, made at its first use. Safe to call from
/// several threads.
class SideStreams {
 public:
  const SideStream& of(c10::Device device);

 private:
  std::mutex mutex_;
  std::map<c10::DeviceIndex, SideStream> streams_;
};

/// Returns the stream on which the calling thread queues kernels of `device`.
c10::Stream current_stream(c10::Device device);

}  // namespace tessera
