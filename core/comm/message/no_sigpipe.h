#pragma once

#include <csignal>
#include <ctime>

namespace tessera {

/// While it lives, a write of this thread to a connection that its peer has closed fails with an
/// error and raises no signal. Threads that it starts meanwhile keep this until they end.
///
/// Gloo writes without suppressing the signal. Python ignores SIGPIPE; a program in C++ would be
/// killed by it without a message.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSigpipe() {
    if (sigismember(&before_, SIGPIPE) == 1) return;  // it was blocked: nothing has changed
    const timespec at_once{};
    while (sigtimedwait(&pipe_, nullptr, &at_once) == SIGPIPE) {  // drops signals raised meanwhile
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t pipe_{}, before_{};
};

}  // namespace tessera
