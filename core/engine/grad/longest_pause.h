#pragma once

#include <chrono>

namespace tessera {

/// How long the host waits for the oldest reduction when many are in flight. A rank that is behind
/// may itself be waiting for this one, so this is not a condition, only a pause that bounds memory
/// in the usual case.
inline constexpr auto kLongestPause = std::chrono::milliseconds(50);

}  // namespace tessera
