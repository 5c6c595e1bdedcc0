#pragma once

#include <chrono>

namespace tessera::tools {

/// Time for the other ranks to report a failure and to end by themselves. A rank that waits for one
/// that died notices within two seconds, mostly, and then still writes its flight record and closes
/// its connections.
constexpr std::chrono::milliseconds kLastWords{5000};
/// The time is over earlier if no rank writes to stderr or fails for so long: then the others
/// compute and have noticed nothing, and waiting only delays the restart.
constexpr std::chrono::milliseconds kSilence{3000};
/// After SIGKILL only the kernel can delay the end (a dead network file system, say).
constexpr std::chrono::milliseconds kKillTime{5000};

}  // namespace tessera::tools
