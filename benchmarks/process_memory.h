#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace tessera::tools {

/// Returns the minor page faults of this process so far.
int64_t minor_faults();

/// Samples `tessera::pss_bytes()` in a thread of its own, which disturbs timings: not for timed
/// steps.
class PeakPss {
 public:
  explicit PeakPss(std::chrono::milliseconds interval = std::chrono::milliseconds(4));
  ~PeakPss();
  PeakPss(const PeakPss&) = delete;
  PeakPss& operator=(const PeakPss&) = delete;

  /// Ends the watch and returns the largest value.
  int64_t stop();

 private:
  std::atomic<bool> stopped_ = false;
  int64_t peak_ = 0;
  std::thread thread_;
};

}  // namespace tessera::tools
