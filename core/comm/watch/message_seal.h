#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/watch/messages.h"

namespace tessera {

/// The numbers of one sender's messages that were received: each passes once. Messages may overtake
/// each other, by at most 64.
class MessageWindow {
 public:
  /// Returns false for a number that has come before, or so late that it may have.
  bool take(int64_t number);

 private:
  int64_t newest_ = -1;
  uint64_t seen_ = 0;  // bit i: number newest_ - i
};

/// Makes the bytes of a rank's messages, with a code by which the others know them, and reads
/// theirs. Messages that no other rank has written, and repeated ones, are dropped and counted.
class MessageSeal {
 public:
  /// `key`: of all ranks of a world, and nobody else's.
  MessageSeal(std::string key, int rank, int size)
      : key_(std::move(key)), rank_(rank), windows_(size) {}

  /// Any thread may call it.
  std::string bytes_of(const Content& content);
  /// One thread may call it. Returns nothing for bytes that are dropped.
  std::optional<Message> message_in(const std::string& bytes);
  int64_t dropped() const { return dropped_.load(); }

 private:
  const std::string key_;
  const int rank_;
  std::vector<MessageWindow> windows_;  // by rank
  std::atomic<int64_t> sent_ = 0;
  std::atomic<int64_t> dropped_ = 0;
};

}  // namespace tessera
