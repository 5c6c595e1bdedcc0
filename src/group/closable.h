#pragma once

#include <tessera/process_group.h>

#include <chrono>

namespace tessera {

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
std::chrono::milliseconds closing_grace(std::chrono::milliseconds timeout);

/// Closes `process_group` if its transport is `Closable`.
void close(const ProcessGroupPtr& process_group) noexcept;

}  // namespace tessera
