#pragma once

#include <tessera/process_group_decorators.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Returns the microseconds since the process started (more exactly: since the library was loaded).
int64_t process_time_us();

std::string_view channel_name(Channel channel);

/// A ring buffer of the last `capacity` collectives of this rank. Thread-safe.
class FlightRecord {
 public:
  explicit FlightRecord(size_t capacity);

  /// Records that a collective is issued now; returns its sequence number, from 0.
  int64_t add(std::string name, std::string subject, Channel channel, int64_t bytes);

  /// Records that collective `sequence` completes now. Does nothing if it is no longer in the ring,
  /// or was already complete.
  void complete(int64_t sequence);

  /// Returns the records in the ring, oldest first.
  std::vector<CollectiveRecord> records() const;

  /// Returns the last `count` records as lines of text, oldest first.
  std::string describe_last(size_t count) const;

 private:
  mutable std::mutex mutex_;
  std::vector<CollectiveRecord> ring_;
  const size_t capacity_;
  int64_t next_ = 0;
};

}  // namespace tessera
