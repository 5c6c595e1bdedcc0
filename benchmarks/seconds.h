#pragma once

#include <chrono>
#include <functional>

namespace tessera {

/// Returns the seconds that `run` takes.
inline double seconds_of(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace tessera
