#include "launcher/with_terminal.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include "launcher/job_report.h"

namespace tessera::tools {
namespace {

/// If the caller closed 0, 1 or 2, a pipe that gets that number would be mistaken for it.
void open_standard_fds() {
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd > STDERR_FILENO) ::close(fd);
}

/// Writes the queued output. A signal ends the wait for a reader that does not read.
void flush(Terminal& terminal, SignalPipe& signals) {
  while (terminal.pending()) {
    pollfd polled[] = {{terminal.next_fd(), POLLOUT, 0}, {signals.fd(), POLLIN, 0}};
    if (::poll(polled, 2, -1) < 0) continue;
    if (polled[0].revents != 0) terminal.write_some();
    if (polled[1].revents == 0) continue;
    for (int signal : signals.take()) {
      if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) return;
    }
  }
}

}  // namespace

int with_terminal(const std::function<int(Terminal&, SignalPipe&)>& body) {
  open_standard_fds();
  SignalPipe signals;
  Terminal terminal;
  const int status = body(terminal, signals);
  flush(terminal, signals);
  const size_t lost = terminal.lost_bytes();
  if (lost == 0) return status;
  say(terminal, fmt::format("{} bytes of output could not be written and are lost", lost));
  flush(terminal, signals);
  return status == 0 ? 1 : status;
}

}  // namespace tessera::tools
