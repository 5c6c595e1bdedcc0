#pragma once

#include <chrono>
#include <vector>

#include "launcher/rank_stream.h"
#include "launcher/signal_pipe.h"
#include "launcher/terminal.h"

namespace tessera::tools {

using Clock = std::chrono::steady_clock;

/// Waits for signals, output of the ranks and room in the terminal, at most until `until`. Output
/// that came is passed on. Returns the signals.
std::vector<int> wait_for_events(SignalPipe& signals, Terminal& terminal,
                                 const std::vector<RankStream*>& streams, Clock::time_point until);

}  // namespace tessera::tools
