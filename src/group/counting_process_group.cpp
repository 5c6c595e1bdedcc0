#include <tessera/process_group_decorators.h>

#include <mutex>
#include <utility>

#include "group/collective.h"
#include "group/peer_message.h"
#include "group/sent_bytes.h"

namespace tessera {

int64_t CollectiveCounts::calls() const {
  return all_gather.calls + reduce_scatter.calls + all_reduce.calls + broadcast.calls +
         barrier.calls + all_to_all.calls;
}

int64_t CollectiveCounts::bytes_sent() const {
  return all_gather.bytes_sent + reduce_scatter.bytes_sent + all_reduce.bytes_sent +
         broadcast.bytes_sent + barrier.bytes_sent + all_to_all.bytes_sent;
}

namespace {

class CountingDecorator : public CountingProcessGroup {
 public:
  using CountingProcessGroup::CountingProcessGroup;

  CollectiveCounts counts() const override {
    std::lock_guard lock(mutex_);
    return counts_;
  }

  void reset_counts() override {
    std::lock_guard lock(mutex_);
    counts_ = {};
  }

 private:
  // Counts after the call, because a call that throws has sent nothing.
  WorkPtr issue(Collective collective) override {
    const auto [kind, bytes] =
        std::visit([this](const auto& call) { return sent_by(call); }, collective.call);
    WorkPtr work = pass_on(std::move(collective));
    std::lock_guard lock(mutex_);
    (counts_.*kind).calls += 1;
    (counts_.*kind).bytes_sent += bytes;
    return work;
  }

  using Sent = std::pair<CollectiveCounts::Entry CollectiveCounts::*, int64_t>;

  Sent sent_by(const AllGather& call) const {
    return {&CollectiveCounts::all_gather, receivers() * static_cast<int64_t>(call.shard.nbytes())};
  }

  Sent sent_by(const ReduceScatter& call) const {
    int64_t numel = 0;
    for (const int r : sends_to()) numel += call.bounds[r + 1] - call.bounds[r];
    return {&CollectiveCounts::reduce_scatter, numel * item_size(call)};
  }

  Sent sent_by(const AllReduce& call) const {
    return {&CollectiveCounts::all_reduce, bytes_of_all_reduce(call.tensor)};
  }

  Sent sent_by(const Broadcast& call) const {
    const auto nbytes = static_cast<int64_t>(call.tensor.nbytes());
    return {&CollectiveCounts::broadcast, rank() == call.root ? receivers() * nbytes : 0};
  }

  // A transport that sends messages at all sends every message of an all-to-all.
  Sent sent_by(const AllToAll& call) const {
    int64_t bytes = 0;
    for (size_t r = 0; r < call.to.size() && receivers() > 0; ++r) {
      if (static_cast<int>(r) != rank()) bytes += message_bytes(call.to[r]);
    }
    return {&CollectiveCounts::all_to_all, bytes};
  }

  Sent sent_by(const Barrier& /*call*/) const { return {&CollectiveCounts::barrier, 0}; }

  int64_t receivers() const { return static_cast<int64_t>(sends_to().size()); }

  // Ranks that share memory each reduce one part with the ranks that they send to. A c10d backend,
  // which has no channels, is assumed to send the minimum.
  int64_t bytes_of_all_reduce(const at::Tensor& tensor) const {
    const auto nbytes = static_cast<int64_t>(tensor.nbytes());
    const int64_t ranks = receivers() + 1;
    if (!has_channels()) return 2 * receivers() * nbytes / ranks;
    const int64_t sharing = is_reduced_whole(tensor) ? 1 : size() / ranks;
    return all_reduce_bytes(nbytes / sharing, ranks);
  }

  mutable std::mutex mutex_;
  CollectiveCounts counts_;
};

}  // namespace

std::shared_ptr<CountingProcessGroup> counting_process_group(ProcessGroupPtr inner) {
  return std::make_shared<CountingDecorator>(std::move(inner));
}

}  // namespace tessera
