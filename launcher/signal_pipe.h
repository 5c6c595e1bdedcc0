#pragma once

#include <signal.h>

#include <array>
#include <vector>

#include "launcher/unique_fd.h"

namespace tessera::tools {

/// While an object lives, the signals that a launcher acts on can be read from a file descriptor.
///
/// A handler with a pipe instead of `signalfd`: it also works when another thread takes the signal.
/// Signals that were ignored before (by nohup, say) stay ignored. SIGPIPE is ignored meanwhile.
class SignalPipe {
 public:
  SignalPipe();
  ~SignalPipe();
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

  int fd() const { return pipe_.read_end.get(); }

  /// Returns the signals that came since the last call, in order.
  std::vector<int> take();

  /// Returns the signals that have their default action again in a program to be started.
  static const std::array<int, 8>& all();

 private:
  Pipe pipe_;
  std::array<struct sigaction, 8> previous_;
};

}  // namespace tessera::tools
