#include "group/flight_record.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace tessera {
namespace {

const auto process_start = std::chrono::steady_clock::now();

}  // namespace

int64_t process_time_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() -
                                                               process_start)
      .count();
}

std::string_view channel_name(Channel channel) {
  switch (channel) {
    case Channel::kParams:
      return "kParams";
    case Channel::kGrads:
      return "kGrads";
    case Channel::kControl:
      return "kControl";
  }
  return "unknown";
}

FlightRecord::FlightRecord(size_t capacity) : capacity_(capacity) {
  TORCH_CHECK_VALUE(capacity > 0, "[tracing_process_group] capacity must be positive; got 0");
  ring_.reserve(capacity);
}

int64_t FlightRecord::add(std::string name, std::string subject, Channel channel, int64_t bytes) {
  std::lock_guard lock(mutex_);
  CollectiveRecord record{next_++, std::move(name), std::move(subject),
                          channel, bytes,           process_time_us()};
  const int64_t sequence = record.sequence;
  if (ring_.size() < capacity_) {
    ring_.push_back(std::move(record));
  } else {
    ring_[sequence % capacity_] = std::move(record);
  }
  return sequence;
}

void FlightRecord::complete(int64_t sequence) {
  std::lock_guard lock(mutex_);
  CollectiveRecord& record = ring_[sequence % capacity_];
  if (record.sequence == sequence && record.completed_us < 0) {
    record.completed_us = process_time_us();
  }
}

std::vector<CollectiveRecord> FlightRecord::records() const {
  std::lock_guard lock(mutex_);
  std::vector<CollectiveRecord> result = ring_;
  std::sort(result.begin(), result.end(),
            [](const auto& a, const auto& b) { return a.sequence < b.sequence; });
  return result;
}

std::string FlightRecord::describe_last(size_t count) const {
  const auto all = records();
  std::string text;
  for (size_t i = all.size() - std::min(count, all.size()); i < all.size(); ++i) {
    const auto& record = all[i];
    const std::string state =
        record.completed_us < 0
            ? fmt::format("not complete after {:.3f} s",
                          1e-6 * (process_time_us() - record.issued_us))
            : fmt::format("took {:.3f} s", 1e-6 * (record.completed_us - record.issued_us));
    text += fmt::format("  #{} {} '{}' ({}), {} bytes, issued at {:.3f} s, {}\n", record.sequence,
                        record.name, record.subject, channel_name(record.channel), record.bytes,
                        1e-6 * record.issued_us, state);
  }
  return text;
}

}  // namespace tessera
