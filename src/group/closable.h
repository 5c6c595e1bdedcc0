#pragma once

#include <tessera/process_group.h>

#include <chrono>

namespace tessera {

/// A process group whose connections its world closes, even if others still hold the process group:
/// threads and sockets must not live on because a model does.
class Closable {
 public:
  virtual ~Closable() = default;

  /// Collectives issued later throw. Waits a moment for messages that are still on their way to
  /// peers, unless an exception is on its way. May be called again.
  virtual void close() noexcept = 0;
};

/// The moment that `close()` waits.
std::chrono::milliseconds closing_grace(std::chrono::milliseconds timeout);

/// Closes a process group that can be closed.
void close(const ProcessGroupPtr& process_group) noexcept;

}  // namespace tessera
