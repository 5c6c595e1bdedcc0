#pragma once

#include <chrono>
#include <vector>

#include "launcher/rank_stream.h"
#include "launcher/signal_pipe.h"
#include "launcher/terminal.h"

namespace tessera::tools {

using Clock = std::chrono::steady_clock;

/// Events of one wait.
struct Events {
  std::vector<int> signals;
  bool control = false;  ///< the control file descriptor is readable
};

/// Waits for signals, output of the ranks, room in the terminal and the control file descriptor
/// (-1: there is none), at most until `until`. Output that came is passed on.
Events wait_for_events(SignalPipe& signals, Terminal& terminal,
                       const std::vector<RankStream*>& streams, Clock::time_point until,
                       int control_fd = -1);

}  // namespace tessera::tools
