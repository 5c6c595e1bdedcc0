#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/grad/unit_gradients.h"

namespace tessera {

/// The units whose gradients a backward is reducing, the oldest first. Pauses the backward while
/// their bytes exceed a limit, if they become fewer by that.
class InFlight {
 public:
  /// `gradients` must live as long as this. `least`: bytes that may always be in flight.
  InFlight(const AllGradients& gradients, int64_t least, bool on_device)
      : gradients_(gradients), limit_(least), on_device_(on_device) {}

  /// Allows two buckets of `nbytes`.
  void allow_buckets(int64_t nbytes);
  void begin_backward();
  void add(size_t unit);
  /// Waits until few enough bytes are in flight, or for a pause at most; `may_wait` = false: not at
  /// all.
  void keep_limit(bool may_wait);
  void clear();
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  const AllGradients& gradients_;
  std::vector<size_t> units_;
  int64_t bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t limit_;
  const bool on_device_;  // gradients, and so reductions, are on a device
  // Backwards left with short pauses, because a full pause has expired without progress.
  int short_backwards_ = 0;
};

}  // namespace tessera
