#include "engine/grad/replica_queue.h"

#include <map>

namespace tessera {
namespace {

// All queues, by their process groups' transports.
struct Queues {
  std::mutex mutex;
  std::map<const ProcessGroup*, std::weak_ptr<ReplicaQueue>> queues;
};

Queues& known() {
  static auto* const known = new Queues();
  return *known;
}

}  // namespace

std::shared_ptr<ReplicaQueue> ReplicaQueue::of(ProcessGroup& replicate) {
  auto& [mutex, queues] = known();
  const std::lock_guard lock(mutex);
  std::erase_if(queues, [](const auto& entry) { return entry.second.expired(); });
  auto& own = queues[&replicate.transport()];
  std::shared_ptr<ReplicaQueue> queue = own.lock();
  if (!queue) own = queue = std::make_shared<ReplicaQueue>();
  return queue;
}

void ReplicaQueue::start_before_others(ProcessGroup& process_group) {
  auto& [mutex, queues] = known();
  std::shared_ptr<ReplicaQueue> queue;
  {
    const std::lock_guard lock(mutex);
    const auto found = queues.find(&process_group.transport());
    if (found != queues.end()) queue = found->second.lock();
  }
  if (queue) queue->start(/*waits=*/true);
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
