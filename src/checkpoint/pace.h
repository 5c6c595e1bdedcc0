#pragma once

#include <chrono>
#include <cstddef>

namespace tessera {

/// Keeps writing below a number of bytes per second.
class Pace {
 public:
  /// 0: no bound.
  explicit Pace(double bytes_per_second) : bytes_per_second_(bytes_per_second) {}

  /// Returns when `nbytes` more may be written.
  void wait_for(size_t nbytes);

 private:
  using Clock = std::chrono::steady_clock;
  double bytes_per_second_;
  Clock::time_point next_ = Clock::now();
};

}  // namespace tessera
