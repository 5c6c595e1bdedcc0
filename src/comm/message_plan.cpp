#include "comm/message_plan.h"

#include <algorithm>

namespace tessera {
namespace {

// True if `segment` may join the last message of `plan`.
bool may_join(const MessagePlan& plan, const Segment& segment, int64_t element_size) {
  if (plan.messages.empty() || segment.numel * element_size > kMaxPackedBytes) {
    return false;
  }
  const Message& message = plan.messages.back();
  const Segment& last = plan.segments.back();
  return last.numel * element_size <= kMaxPackedBytes &&
         (message.numel + segment.numel) * element_size <= kMaxMessageBytes;
}

}  // namespace

MessagePlan plan_messages(std::span<const Piece> pieces, int64_t begin, int64_t end,
                          int64_t element_size) {
  const int64_t max_numel = kMaxMessageBytes / element_size;
  MessagePlan plan;
  for (size_t piece = 0; piece < pieces.size(); ++piece) {
    const int64_t stop = std::min(end, pieces[piece].begin + pieces[piece].numel);
    for (int64_t at = std::max(begin, pieces[piece].begin); at < stop;) {
      const Segment segment{piece, at, std::min(stop - at, max_numel)};
      if (may_join(plan, segment, element_size)) {
        plan.messages.back().last += 1;
        plan.messages.back().numel += segment.numel;
      } else {
        plan.messages.push_back({plan.segments.size(), plan.segments.size() + 1, segment.numel});
      }
      plan.segments.push_back(segment);
      at += segment.numel;
    }
  }
  return plan;
}

}  // namespace tessera
