#include "comm/group/flight_record.h"

#include <algorithm>
#include <utility>

#include "comm/group/process_time.h"

namespace tessera {

int64_t FlightRecord::add(FlightEntry entry) {
  const std::lock_guard lock(mutex_);
  entry.sequence = next_++;
  entry.issued_us = process_time_us();
  const int64_t sequence = entry.sequence;
  (ring_.size() < capacity_ ? ring_.emplace_back() : at(sequence)) = std::move(entry);
  return sequence;
}

void FlightRecord::complete(int64_t sequence) {
  const std::lock_guard lock(mutex_);
  FlightEntry& entry = at(sequence);
  if (entry.sequence == sequence && entry.completed_us < 0) entry.completed_us = process_time_us();
}

std::optional<FlightEntry> FlightRecord::find(Channel channel, int64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(ring_, [&](const FlightEntry& entry) {
    return entry.channel == channel && entry.number == number;
  });
  return found == ring_.end() ? std::nullopt : std::optional(*found);
}

std::optional<FlightEntry> FlightRecord::last() const {
  const std::lock_guard lock(mutex_);
  return ring_.empty() ? std::nullopt : std::optional(ring_[(next_ - 1) % capacity_]);
}

std::vector<FlightEntry> FlightRecord::entries() const {
  std::vector<FlightEntry> result;
  {
    const std::lock_guard lock(mutex_);
    result = ring_;
  }
  std::ranges::sort(result, {}, &FlightEntry::sequence);
  return result;
}

}  // namespace tessera
