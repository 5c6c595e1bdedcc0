#include <c10/util/Exception.h>
#include <tessera/process_group.h>

#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera {
namespace {

class FaultProcessGroup : public ProcessGroup {
 public:
  FaultProcessGroup(ProcessGroupPtr inner, std::vector<Fault> faults)
      : inner_(std::move(inner)), faults_(std::move(faults)), seen_(faults_.size()) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  std::string backend_name() const override { return inner_->backend_name(); }
  bool has_channels() const override { return inner_->has_channels(); }

  WorkPtr all_gather(const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds, const CollectiveTag& tag) override {
    inject("all_gather", tag);
    return inner_->all_gather(flat, shard, bounds, tag);
  }

  WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                         std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                         const CollectiveTag& tag) override {
    inject("reduce_scatter", tag);
    return inner_->reduce_scatter(out, std::move(pieces), bounds, options, tag);
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) override {
    inject("all_reduce", tag);
    return inner_->all_reduce(tensor, op, tag);
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag) override {
    inject("broadcast", tag);
    return inner_->broadcast(tensor, root, tag);
  }

  WorkPtr all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                     const CollectiveTag& tag) override {
    inject("all_to_all", tag);
    return inner_->all_to_all(std::move(from), std::move(to), tag);
  }

  void barrier(const CollectiveTag& tag) override {
    inject("barrier", tag);
    inner_->barrier(tag);
  }

  WorkPtr arrive(const CollectiveTag& tag) override {
    inject("barrier", tag);
    return inner_->arrive(tag);
  }

  std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& tag) override {
    return inner_->share(nbytes, tag);
  }
  void release(const SharedBuffer& buffer) override { inner_->release(buffer); }
  std::vector<int> sends_to() const override { return inner_->sends_to(); }

 private:
  void inject(const std::string& name, const CollectiveTag& tag) {
    std::vector<Fault> due;
    {
      std::lock_guard lock(mutex_);
      for (size_t i = 0; i < faults_.size(); ++i) {
        const Fault& fault = faults_[i];
        if ((fault.name.empty() || fault.name == name) && seen_[i]++ == fault.nth) {
          due.push_back(fault);
        }
      }
    }
    for (const Fault& fault : due) {
      std::this_thread::sleep_for(fault.delay);
      TORCH_CHECK_WITH(DistBackendError, !fault.fail, "[", name, "] unit '", tag.subject,
                       "': rank ", rank(), " of ", size(), " was told to fail here (fault ",
                       fault.nth, ")");
    }
  }

  const ProcessGroupPtr inner_;
  const std::vector<Fault> faults_;
  std::mutex mutex_;
  std::vector<int64_t> seen_;  // matching collectives so far, per fault
};

}  // namespace

ProcessGroupPtr fault_process_group(ProcessGroupPtr inner, std::vector<Fault> faults) {
  TORCH_CHECK_VALUE(inner != nullptr, "[fault_process_group] `inner` must be given");
  return std::make_shared<FaultProcessGroup>(std::move(inner), std::move(faults));
}

}  // namespace tessera
