#include <c10/util/Exception.h>
#include <tessera/process_group.h>

#include <mutex>
#include <utility>
#include <vector>

#include "group/check_arguments.h"
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

using Entry = CollectiveCounts::Entry;

class CountingDecorator : public CountingProcessGroup {
 public:
  explicit CountingDecorator(ProcessGroupPtr inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  std::string backend_name() const override { return inner_->backend_name(); }
  bool has_channels() const override { return inner_->has_channels(); }

  // Counted after the call: one that throws has sent nothing.
  WorkPtr all_gather(const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds, const CollectiveTag& tag) override {
    WorkPtr work = inner_->all_gather(flat, shard, bounds, tag);
    count(&CollectiveCounts::all_gather, receivers() * static_cast<int64_t>(shard.nbytes()));
    return work;
  }

  WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                         std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                         const CollectiveTag& tag) override {
    WorkPtr work = inner_->reduce_scatter(out, std::move(pieces), bounds, options, tag);
    int64_t numel = 0;
    for (const int r : inner_->sends_to()) numel += bounds[r + 1] - bounds[r];
    count(&CollectiveCounts::reduce_scatter, numel * message_item_size(out, options));
    return work;
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) override {
    WorkPtr work = inner_->all_reduce(tensor, op, tag);
    count(&CollectiveCounts::all_reduce, bytes_of_all_reduce(tensor));
    return work;
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag) override {
    WorkPtr work = inner_->broadcast(tensor, root, tag);
    count(&CollectiveCounts::broadcast,
          rank() == root ? receivers() * static_cast<int64_t>(tensor.nbytes()) : 0);
    return work;
  }

  WorkPtr all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                     const CollectiveTag& tag) override {
    // Where anything is sent, every message is.
    int64_t bytes = 0;
    for (size_t r = 0; r < to.size() && receivers() > 0; ++r) {
      if (static_cast<int>(r) != rank()) bytes += message_bytes(to[r]);
    }
    WorkPtr work = inner_->all_to_all(std::move(from), std::move(to), tag);
    count(&CollectiveCounts::all_to_all, bytes);
    return work;
  }

  void barrier(const CollectiveTag& tag) override {
    inner_->barrier(tag);
    count(&CollectiveCounts::barrier, 0);
  }

  WorkPtr arrive(const CollectiveTag& tag) override {
    WorkPtr work = inner_->arrive(tag);
    count(&CollectiveCounts::barrier, 0);
    return work;
  }

  std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& tag) override {
    return inner_->share(nbytes, tag);
  }
  void release(const SharedBuffer& buffer) override { inner_->release(buffer); }
  std::vector<int> sends_to() const override { return inner_->sends_to(); }

  CollectiveCounts counts() const override {
    std::lock_guard lock(mutex_);
    return counts_;
  }

  void reset_counts() override {
    std::lock_guard lock(mutex_);
    counts_ = {};
  }

 private:
  int64_t receivers() const { return static_cast<int64_t>(inner_->sends_to().size()); }

  // Ranks that share memory have a part each, which they reduce with those they send to. A c10d
  // backend, which has no channels, is taken to send no more than it must.
  int64_t bytes_of_all_reduce(const at::Tensor& tensor) const {
    const auto nbytes = static_cast<int64_t>(tensor.nbytes());
    const int64_t ranks = receivers() + 1;
    if (!has_channels()) return 2 * receivers() * nbytes / ranks;
    const int64_t sharing = is_reduced_whole(tensor) ? 1 : size() / ranks;
    return all_reduce_bytes(nbytes / sharing, ranks);
  }

  void count(Entry CollectiveCounts::*kind, int64_t bytes) {
    std::lock_guard lock(mutex_);
    (counts_.*kind).calls += 1;
    (counts_.*kind).bytes_sent += bytes;
  }

  const ProcessGroupPtr inner_;
  mutable std::mutex mutex_;
  CollectiveCounts counts_;
};

}  // namespace

std::shared_ptr<CountingProcessGroup> counting_process_group(ProcessGroupPtr inner) {
  TORCH_CHECK_VALUE(inner != nullptr, "[counting_process_group] `inner` must be given");
  return std::make_shared<CountingDecorator>(std::move(inner));
}

}  // namespace tessera
