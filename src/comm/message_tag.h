#pragma once

#include <tessera/process_group.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace tessera {

/// Hashes what ranks must agree on for a collective into a non-negative message tag.
///
/// Ranks that disagree (on the order, the subject, a size) wait for messages that never come and
/// time out, instead of writing one tensor into another.
class MessageTag {
 public:
  MessageTag(std::string_view collective, const CollectiveTag& tag, int64_t sequence) {
    mix(collective);
    mix(tag.subject);
    mix(static_cast<int64_t>(tag.channel));
    mix(sequence);
  }

  MessageTag& mix(int64_t value) {
    hash_ = (hash_ ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15ull;
    hash_ ^= hash_ >> 32;
    return *this;
  }

  MessageTag& mix(std::string_view text) {
    mix(static_cast<int64_t>(text.size()));
    for (const char c : text) {
      mix(static_cast<int64_t>(c));
    }
    return *this;
  }

  MessageTag& mix(std::span<const int64_t> values) {
    for (const int64_t value : values) {
      mix(value);
    }
    return *this;
  }

  int value() const { return static_cast<int>((hash_ >> 16) & 0x7FFFFFFF); }

 private:
  uint64_t hash_ = 0xCBF29CE484222325ull;
};

}  // namespace tessera
