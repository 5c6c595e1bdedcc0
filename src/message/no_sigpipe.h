#pragma once

#include <csignal>
#include <ctime>

namespace tessera {

/// While it lives, this thread gets an error, not the signal, when it writes to a connection whose
/// peer has gone; so do threads that it starts, for good.
///
/// Gloo writes without asking for that. In Python SIGPIPE is ignored; a program in C++ would be
/// killed by it without a word.
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
    while (sigtimedwait(&pipe_, nullptr, &at_once) == SIGPIPE) {  // drops what came meanwhile
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t pipe_{}, before_{};
};

}  // namespace tessera
