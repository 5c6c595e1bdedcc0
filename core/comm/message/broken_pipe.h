#pragma once

#include <csignal>

namespace tessera {

/// From now on, a write of this process to a connection that its peer has closed fails with an
/// error, where SIGPIPE would end it without a message: Gloo and c10d's store write without
/// suppressing the signal. Leaves a disposition that the program has chosen, as Python does.
/// Programs that the process starts have the default one.
inline void survive_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = [](int /*signal*/) {};
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGPIPE, &action, nullptr);
}

}  // namespace tessera
