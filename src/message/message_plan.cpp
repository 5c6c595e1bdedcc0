#include "message/message_plan.h"

#include <algorithm>

namespace tessera {
namespace {

// True if `part` may join the last message of `plan`.
bool may_join(const MessagePlan& plan, const PiecePart& part, int64_t element_size) {
  if (plan.messages.empty() || part.numel * element_size > kMaxPackedBytes) {
    return false;
  }
  const Message& message = plan.messages.back();
  const PiecePart& last = plan.parts.back();
  return last.numel * element_size <= kMaxPackedBytes &&
         (message.numel + part.numel) * element_size <= kMaxMessageBytes;
}

}  // namespace

MessagePlan plan_messages(std::span<const Piece> pieces, int64_t begin, int64_t end,
                          int64_t element_size) {
  const int64_t max_numel = kMaxMessageBytes / element_size;
  MessagePlan plan;
  for (size_t piece = 0; piece < pieces.size(); ++piece) {
    const int64_t stop = std::min(end, pieces[piece].begin + pieces[piece].numel);
    for (int64_t at = std::max(begin, pieces[piece].begin); at < stop;) {
      const PiecePart part{piece, at, std::min(stop - at, max_numel)};
      if (may_join(plan, part, element_size)) {
        plan.messages.back().last += 1;
        plan.messages.back().numel += part.numel;
      } else {
        plan.messages.push_back({plan.parts.size(), plan.parts.size() + 1, part.numel});
      }
      plan.parts.push_back(part);
      at += part.numel;
    }
  }
  return plan;
}

}  // namespace tessera
