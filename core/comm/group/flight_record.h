#pragma once

#include <tessera/comm/process_group_decorators.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/group/progress.h"

namespace tessera {

/// A collective in the flight record of one rank.
struct FlightEntry : CollectiveRecord {
  int64_t number = 0;  ///< of earlier collectives in the channel
  uint64_t fingerprint = 0;
  std::string text;  ///< `CollectiveForm::text()`
  Phase phase = Phase::kUserCode;
  int64_t step = 0;
};

/// A ring buffer of the last `capacity` collectives of this rank. Thread-safe.
class FlightRecord {
 public:
  explicit FlightRecord(size_t capacity) : capacity_(capacity) {}

  /// Records a collective that is issued now. Sets `sequence`, the number of earlier ones, and
  /// `issued_us`; returns the sequence.
  int64_t add(FlightEntry entry);
  /// Records that collective `sequence` completes now. Does nothing if it is no longer in the ring,
  /// or was already complete.
  void complete(int64_t sequence);

  /// Returns the record of the collective with this number in its channel, if it is in the ring.
  std::optional<FlightEntry> find(Channel channel, int64_t number) const;
  /// Returns the newest record, if there is one.
  std::optional<FlightEntry> last() const;
  /// Returns the records in the ring, oldest first.
  std::vector<FlightEntry> entries() const;

 private:
  FlightEntry& at(int64_t sequence) { return ring_[sequence % capacity_]; }

  mutable std::mutex mutex_;
  std::vector<FlightEntry> ring_;
  const size_t capacity_;
  int64_t next_ = 0;
};

}  // namespace tessera
