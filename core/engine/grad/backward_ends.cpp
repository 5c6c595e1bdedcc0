#include "engine/grad/backward_ends.h"

#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace tessera {

std::shared_ptr<BackwardEnds> BackwardEnds::of_current_run() {
  static std::mutex mutex;
  static auto* const runs = new std::map<int, std::weak_ptr<BackwardEnds>>();
  const std::lock_guard lock(mutex);
  std::erase_if(*runs, [](const auto& entry) { return entry.second.expired(); });
  auto& known = (*runs)[torch::autograd::get_current_graph_task_id()];
  std::shared_ptr<BackwardEnds> ends = known.lock();
  if (!ends) known = ends = std::make_shared<BackwardEnds>();
  return ends;
}

void BackwardEnds::add() {
  const std::lock_guard lock(mutex_);
  ++expected_;
}

void BackwardEnds::end(int64_t model, std::function<void()> end) {
  std::map<int64_t, std::function<void()>> ready;
  {
    const std::lock_guard lock(mutex_);
    ends_.emplace(model, std::move(end));
    if (--expected_ > 0) return;
    ready.swap(ends_);
  }
  for (const auto& [number, carry_out] : ready) carry_out();
}

}  // namespace tessera
