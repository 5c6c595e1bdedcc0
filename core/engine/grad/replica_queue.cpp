#include "engine/grad/replica_queue.h"

#include <map>

namespace tessera {

std::shared_ptr<ReplicaQueue> ReplicaQueue::of(ProcessGroup& replicate) {
  static std::mutex mutex;
  static auto* const queues = new std::map<const ProcessGroup*, std::weak_ptr<ReplicaQueue>>();
  const std::lock_guard lock(mutex);
  std::erase_if(*queues, [](const auto& entry) { return entry.second.expired(); });
  auto& known = (*queues)[&replicate.transport()];
  std::shared_ptr<ReplicaQueue> queue = known.lock();
  if (!queue) known = queue = std::make_shared<ReplicaQueue>();
  return queue;
}

void ReplicaQueue::push(const std::shared_ptr<Reduction>& reduction) {
  const std::lock_guard lock(mutex_);
  reductions_.push_back(reduction);
}

void ReplicaQueue::start(bool waits) {
  const std::lock_guard lock(mutex_);
  while (!reductions_.empty()) {
    const std::shared_ptr<Reduction> oldest = reductions_.front().lock();
    if (oldest && !waits && !oldest->is_completed()) return;
    reductions_.pop_front();
    if (oldest) oldest->replicate();
  }
}

}  // namespace tessera
