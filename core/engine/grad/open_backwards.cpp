#include "engine/grad/open_backwards.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera {

bool OpenBackwards::is_latest(int id) const {
  return !open_.empty() && !overlapped_ && open_.back().id == id && !open_.back().alive.expired();
}

bool OpenBackwards::add(int id, const std::shared_ptr<void>& alive) {
  drop_failed();
  check_nested(true);
  const auto known = std::find_if(open_.begin(), open_.end(),
                                  [id](const Open& backward) { return backward.id == id; });
  // A nested backward ends before the one around it goes on.
  check_nested(known == open_.end() || known + 1 == open_.end());
  if (known != open_.end()) return false;
  open_.push_back({id, alive});
  began_ = true;
  return true;
}

bool OpenBackwards::end(int id) {
  drop_failed();
  check_nested(open_.empty() || open_.back().id == id);
  std::erase_if(open_, [id](const Open& backward) { return backward.id == id; });
  if (open_.empty()) began_ = false;
  return open_.empty();
}

bool OpenBackwards::empty() {
  drop_failed();
  return open_.empty();
}

void OpenBackwards::drop_failed() {
  std::erase_if(open_, [](const Open& backward) { return backward.alive.expired(); });
  if (open_.empty()) overlapped_ = false;
}

void OpenBackwards::check_nested(bool nested) {
  if (may_overlap_) return;
  overlapped_ = overlapped_ || !nested;
  TORCH_CHECK(
      !overlapped_,
      "[tessera] two backwards of one sharded model run at the same time, in two threads: the "
      "ranks can't reduce their gradients in one order. Let one end before the other begins");
}

}  // namespace tessera
