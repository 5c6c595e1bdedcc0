#include <c10/util/Exception.h>
#include <tessera/process_group.h>

#include <mutex>
#include <utility>

#include "comm/check_arguments.h"

namespace tessera {

int64_t CollectiveCounts::calls() const {
  return all_gather.calls + reduce_scatter.calls + all_reduce.calls + broadcast.calls +
         barrier.calls;
}

int64_t CollectiveCounts::bytes_sent() const {
  return all_gather.bytes_sent + reduce_scatter.bytes_sent + all_reduce.bytes_sent +
         broadcast.bytes_sent + barrier.bytes_sent;
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
    count(&CollectiveCounts::all_gather, (size() - 1) * static_cast<int64_t>(shard.nbytes()));
    return work;
  }

  WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                         std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                         const CollectiveTag& tag) override {
    WorkPtr work = inner_->reduce_scatter(out, std::move(pieces), bounds, options, tag);
    const int64_t own = bounds[rank() + 1] - bounds[rank()];
    count(&CollectiveCounts::reduce_scatter,
          (bounds.back() - own) * message_item_size(out, options));
    return work;
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) override {
    WorkPtr work = inner_->all_reduce(tensor, op, tag);
    count(&CollectiveCounts::all_reduce,
          2 * (size() - 1) * static_cast<int64_t>(tensor.nbytes()) / size());
    return work;
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag) override {
    WorkPtr work = inner_->broadcast(tensor, root, tag);
    count(&CollectiveCounts::broadcast,
          rank() == root ? (size() - 1) * static_cast<int64_t>(tensor.nbytes()) : 0);
    return work;
  }

  void barrier(const CollectiveTag& tag) override {
    inner_->barrier(tag);
    count(&CollectiveCounts::barrier, 0);
  }

  CollectiveCounts counts() const override {
    std::lock_guard lock(mutex_);
    return counts_;
  }

  void reset_counts() override {
    std::lock_guard lock(mutex_);
    counts_ = {};
  }

 private:
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
