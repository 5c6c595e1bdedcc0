#pragma once

#include <tessera/process_group.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// Longest message. One that fits the cache is read, and summed, before it leaves it, while the
/// next ones arrive.
inline constexpr int64_t kMaxMessageBytes = int64_t{1} << 20;

/// Shorter parts of pieces travel together in one message, copied.
inline constexpr int64_t kMaxPackedBytes = int64_t{32} << 10;

/// A part of one piece.
struct PiecePart {
  size_t piece = 0;
  int64_t begin = 0;  ///< in the flat buffer
  int64_t numel = 0;
};

/// Parts `[first, last)` of the plan, one after another.
struct Message {
  size_t first = 0;
  size_t last = 0;
  int64_t numel = 0;
};

/// How a range of a flat buffer that is given in pieces is cut into messages. It depends on nothing
/// but the arguments, so that sender and receiver come to the same plan.
struct MessagePlan {
  std::vector<PiecePart> parts;
  std::vector<Message> messages;
};

MessagePlan plan_messages(std::span<const Piece> pieces, int64_t begin, int64_t end,
                          int64_t element_size);

}  // namespace tessera
