#pragma once

#include <deque>
#include <memory>
#include <mutex>

#include "engine/grad/unit_gradients.h"

namespace tessera {

/// The reductions of all models that share a replicate process group, in the order in which they
/// were launched: the order in which their sums are added up over the replicas. A queue for each
/// model would leave open which of two models comes first where one backward, or several before a
/// step, give gradients to both.
class ReplicaQueue {
 public:
  /// Returns the queue of `replicate`. It must live as long as that.
  static std::shared_ptr<ReplicaQueue> of(ProcessGroup& replicate);

  /// Starts all reductions of the queue of `process_group`, if it is a replicate one, too: all
  /// ranks then issue them before what they issue on it next.
  static void start_before_others(ProcessGroup& process_group);

  /// Appends a reduction that was launched.
  void push(const std::shared_ptr<Reduction>& reduction);
  /// Starts adding up the replicas' sums: of all reductions, for which it waits, or only of those
  /// for which it need not wait.
  void start(bool waits);

 private:
  std::mutex mutex_;
  std::deque<std::weak_ptr<Reduction>> reductions_;  // expired: dropped with its model
};

}  // namespace tessera
