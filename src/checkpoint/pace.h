#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace tessera {

/// Keeps writing below a number of bytes per second.
class Pace {
 public:
  /// 0: no bound. `count`, if there is one, is called with the bytes of each write; an error that
  /// it throws ends the writing.
  explicit Pace(double bytes_per_second, std::function<void(int64_t nbytes)> count = {})
      : bytes_per_second_(bytes_per_second), count_(std::move(count)) {}

  /// Returns when `nbytes` more may be written.
  void wait_for(size_t nbytes);

 private:
  using Clock = std::chrono::steady_clock;
  double bytes_per_second_;
  std::function<void(int64_t)> count_;
  Clock::time_point next_ = Clock::now();
};

}  // namespace tessera
