#include "planner/paper_group.h"

#include <ATen/ops/empty.h>
#include <tessera/comm/fake_world.h>
#include <tessera/comm/process_group_decorators.h>

#include <memory>
#include <utility>
#include <variant>

#include "comm/group/capability.h"

namespace tessera {
namespace {

class PaperGroup : public ProcessGroupDecorator, public HasClock {
 public:
  PaperGroup(const PaperRanks& ranks, CollectiveObserver& observer,
             std::shared_ptr<CountingProcessGroup> counter)
      : ProcessGroupDecorator(counter),
        ranks_(ranks),
        observer_(observer),
        counter_(std::move(counter)) {}

  ProcessGroup& transport() override { return *this; }
  std::optional<c10::DeviceType> device_type() const override { return std::nullopt; }
  std::vector<int> sends_to() const override {
    return ranks_.sends ? counter_->sends_to() : std::vector<int>();
  }
  std::chrono::steady_clock::time_point now() const override { return observer_.now(); }
  void sleep_for(std::chrono::steady_clock::duration longest) override {
    observer_.sleep_for(longest);
  }

 protected:
  std::optional<SharedBuffer> shared(int64_t nbytes) const {
    const at::Tensor bytes = at::empty({nbytes}, at::device(at::kMeta).dtype(at::kByte));
    return SharedBuffer{.bytes = bytes, .read_only = bytes, .stays_whole = !ranks_.sends};
  }

 private:
  WorkPtr issue(Collective collective) override {
    if (const auto* const reduction = std::get_if<ReduceScatter>(&collective.call))
      remember_losses(*reduction);
    const int64_t before = counter_->counts().bytes_sent();
    const WorkPtr done = pass_on(collective);
    const int64_t sent = counter_->counts().bytes_sent() - before;
    const WorkPtr work = observer_.on_collective(*this, collective, sent);
    return work ? work : done;
  }

  // Makes room for what messages in blocks lose.
  void remember_losses(const ReduceScatter& reduction) const {
    const ReduceScatterOptions& options = reduction.options;
    const bool loses = ranks_.sends && size() > 1 && options.encoding != Encoding::kPlain;
    if (loses && options.error && !options.error->defined())
      *options.error =
          at::empty({reduction.bounds.back()}, reduction.out.options().dtype(at::kFloat));
  }

  const PaperRanks ranks_;
  CollectiveObserver& observer_;
  const std::shared_ptr<CountingProcessGroup> counter_;
};

// Ranks that send messages.
struct SendingGroup : PaperGroup {
  using PaperGroup::PaperGroup;
  bool gathers_sums() const override { return true; }
};
// Ranks of one host.
struct SharingGroup : PaperGroup, SharesMemory {
  using PaperGroup::PaperGroup;
  std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& /*tag*/) override {
    return shared(nbytes);
  }
  void release(const SharedBuffer& /*buffer*/) override {}
};
// Ranks of several hosts that share memory on each.
struct HostsGroup : SharingGroup {
  using SharingGroup::SharingGroup;
  bool gathers_sums() const override { return true; }
};

}  // namespace

ProcessGroupPtr paper_process_group(const PaperRanks& ranks, CollectiveObserver& observer) {
  const auto counter = counting_process_group(fake_process_group(ranks.rank, ranks.size));
  if (!ranks.shares_memory || ranks.size == 1)
    return std::make_shared<SendingGroup>(ranks, observer, counter);
  if (ranks.sends) return std::make_shared<HostsGroup>(ranks, observer, counter);
  return std::make_shared<SharingGroup>(ranks, observer, counter);
}

}  // namespace tessera
