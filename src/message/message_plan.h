#pragma once

#include <tessera/process_group.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// The longest message. One that fits the cache is read, and summed, before it leaves the cache,
/// while the next ones arrive.
inline constexpr int64_t kMaxMessageBytes = int64_t{1} << 20;

/// Parts of pieces up to this size are copied into a common message.
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

/// How a range of a flat buffer that is given in pieces is cut into messages. It depends on the
/// arguments alone, so that sender and receiver compute the same plan.
struct MessagePlan {
  std::vector<PiecePart> parts;
  std::vector<Message> messages;
};

MessagePlan plan_messages(std::span<const Piece> pieces, int64_t begin, int64_t end,
                          int64_t element_size);

}  // namespace tessera
