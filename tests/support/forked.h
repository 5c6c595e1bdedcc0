#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>

namespace tessera {

/// A child that is forked here, runs `fn` and ends: with status 0, or 1 if `fn` throws. It is
/// killed with the object, and after `seconds`.
class Forked {
 public:
  explicit Forked(const std::function<void()>& fn, unsigned seconds = 30) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::alarm(seconds);
    try {
      fn();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "[child] %s\n", error.what());
      ::_exit(1);
    }
    ::_exit(0);
  }
  ~Forked() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }
  Forked(const Forked&) = delete;
  Forked& operator=(const Forked&) = delete;

  /// Its exit status; 128 + N if signal N killed it.
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  pid_t pid_;
};

inline int status_of_child(const std::function<void()>& fn) { return Forked(fn).wait(); }

}  // namespace tessera
