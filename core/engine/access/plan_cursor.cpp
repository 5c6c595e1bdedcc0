#include "engine/access/plan_cursor.h"

#include <algorithm>

namespace tessera {

void PlanCursor::set(const PassOrder& order, const std::vector<int64_t>& nbytes,
                     int64_t resident_bytes, int prefetch) {
  uses_ = order.joined();
  forward_end_ = std::ssize(order.forward);
  steps_ = plan_residency(uses_, nbytes, resident_bytes, prefetch);
  restart();
}

ptrdiff_t PlanCursor::find_ahead(int unit, ptrdiff_t end) const {
  const auto begin = uses_.begin();
  const auto next = std::find(begin + std::min(position_ + 1, end), begin + end, unit);
  return next == begin + end ? kStart : next - begin;
}

}  // namespace tessera
