#pragma once

#include <functional>

namespace tessera {

/// The sockets of a Gloo device: its listening one, and the connections of the process groups over
/// it. Gloo gives no access to them, so they are found as the descriptors that the device's thread
/// polls; none is found where /proc is missing.
class GlooSockets {
 public:
  /// Runs `make_device` to make one.
  explicit GlooSockets(const std::function<void()>& make_device);

  /// Must be called when this rank is connected to all others. Afterwards strangers can't connect
  /// to the device (Gloo would keep each of their connections open), and child processes do not
  /// have the sockets.
  void close_to_others() const;

 private:
  int poller_ = -1;  // an epoll descriptor
};

}  // namespace tessera
