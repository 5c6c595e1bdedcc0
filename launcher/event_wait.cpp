#include "launcher/event_wait.h"

#include <poll.h>

#include <algorithm>

namespace tessera::tools {
namespace {

int poll_timeout(Clock::time_point until) {
  if (until == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

}  // namespace

std::vector<int> wait_for_events(SignalPipe& signals, Terminal& terminal,
                                 const std::vector<RankStream*>& streams, Clock::time_point until) {
  std::vector<pollfd> polled{{signals.fd(), POLLIN, 0}};
  std::vector<RankStream*> open;
  if (!terminal.full()) {  // else the ranks wait, as they would for a slow terminal
    for (RankStream* stream : streams) {
      if (!stream->is_open()) continue;
      open.push_back(stream);
      polled.push_back({stream->fd(), POLLIN, 0});
    }
  }
  const bool writes = terminal.pending();
  if (writes) polled.push_back({terminal.next_fd(), POLLOUT, 0});
  if (::poll(polled.data(), polled.size(), poll_timeout(until)) <= 0) return {};

  const std::vector<int> taken = polled[0].revents != 0 ? signals.take() : std::vector<int>();
  for (size_t i = 0; i < open.size(); ++i) {
    if (polled[1 + i].revents != 0) open[i]->read_some();
  }
  if (writes && polled.back().revents != 0) terminal.write_some();
  return taken;
}

}  // namespace tessera::tools
