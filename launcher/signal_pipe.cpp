#include "launcher/signal_pipe.h"

#include <fcntl.h>

#include <cerrno>

namespace tessera::tools {
namespace {

volatile sig_atomic_t handler_fd = -1;

void on_signal(int signal) {
  const int saved_errno = errno;
  const auto byte = static_cast<unsigned char>(signal);
  // A full pipe loses nothing that matters: the launcher is about to check everything anyway.
  [[maybe_unused]] const ssize_t written = ::write(handler_fd, &byte, 1);
  errno = saved_errno;
}

}  // namespace

const std::array<int, 8>& SignalPipe::all() {
  static constexpr std::array<int, 8> kSignals = {SIGCHLD, SIGINT,  SIGTERM, SIGHUP,
                                                  SIGUSR1, SIGUSR2, SIGTSTP, SIGPIPE};
  return kSignals;
}

SignalPipe::SignalPipe() {
  for (int fd : {pipe_.read_end.get(), pipe_.write_end.get()}) {
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
  }
  handler_fd = pipe_.write_end.get();
  for (size_t i = 0; i < all().size(); ++i) {
    ::sigaction(all()[i], nullptr, &previous_[i]);
    if (previous_[i].sa_handler == SIG_IGN && all()[i] != SIGCHLD) continue;
    struct sigaction action {};
    action.sa_handler = all()[i] == SIGPIPE ? SIG_IGN : on_signal;
    action.sa_flags = SA_RESTART;
    ::sigaction(all()[i], &action, nullptr);
  }
}

SignalPipe::~SignalPipe() {
  for (size_t i = 0; i < all().size(); ++i) {
    ::sigaction(all()[i], &previous_[i], nullptr);
  }
  handler_fd = -1;
}

std::vector<int> SignalPipe::take() {
  std::vector<int> signals;
  unsigned char bytes[64];
  ssize_t count = 0;
  while ((count = ::read(fd(), bytes, sizeof(bytes))) > 0) {
    signals.insert(signals.end(), bytes, bytes + count);
  }
  return signals;
}

}  // namespace tessera::tools
