#pragma once

#include <chrono>
#include <cstdint>

namespace tessera {

inline const auto kProcessStart = std::chrono::steady_clock::now();

/// Returns the microseconds since the process started (more exactly: since the library was loaded).
inline int64_t process_time_us() {
  const auto time = std::chrono::steady_clock::now() - kProcessStart;
  return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
}

}  // namespace tessera
