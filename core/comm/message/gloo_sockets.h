#pragma once

#include <functional>

namespace tessera {

/// The sockets of a Gloo device: its listening one, and the connections of the process groups over
/// it. Gloo gives no access to them, so they are found as the descriptors that the device's thread
/// polls; none is found where /proc is missing.
class GlooSockets {
 public:
  /// Runs `make_device`, which makes one.
  explicit GlooSockets(const std::function<void()>& make_device);

  /// Must be called when this rank is connected to all others. Strangers can't connect to the
  /// device any more, each of whose connections Gloo would keep open for good, and children do not
  /// have the sockets.
  void close_to_others() const;

 private:
  int poller_ = -1;  // an epoll descriptor
};

}  // namespace tessera
