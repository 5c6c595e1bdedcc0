#pragma once

#include <functional>

#include "launcher/signal_pipe.h"
#include "launcher/terminal.h"

namespace tessera::tools {

/// Runs `body` with the launcher's terminal and signals, writes the output that is left and returns
/// the status of `body`: 1 in place of 0 if output was lost.
int with_terminal(const std::function<int(Terminal&, SignalPipe&)>& body);

}  // namespace tessera::tools
