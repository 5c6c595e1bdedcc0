#include <c10/util/Exception.h>
#include <tessera/comm/process_group.h>

#include <exception>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/device/device.h"
#include "comm/group/capability.h"
#include "comm/group/collective.h"
#include "comm/group/collective_watch.h"

namespace tessera {
namespace {

// Returns true if the collective's tensors are in the memory of a device. Ranks must agree on it.
bool is_on_device(const Collective& collective, int size) {
  bool result = false, is_known = size == 1;
  std::visit(
      [&](const auto& call) {
        is_known = is_known || std::is_same_v<std::decay_t<decltype(call)>, Barrier>;
        for_each_tensor(call, [&](const at::Tensor& tensor, bool /*is_written*/) {
          is_known = is_known || tensor.defined();
          result = result || (tensor.defined() && !is_host(tensor.device()));
        });
      },
      collective.call);
  TORCH_CHECK_VALUE(
      is_known, "[", collective.name(), "] unit '", collective.tag.subject,
      "': a rank that sends and receives nothing must pass an empty tensor of the device, which "
      "shows over which connection the others do; all that it passed are undefined");
  return result;
}

// The ranks agree through host memory on what they do: these messages are small, are read at once,
// and need no place in a device's queue. Also, the watch sees them, as it does not see the
// collectives of a device's backend.
class DeviceProcessGroup : public ProcessGroup,
                           public Closable,
                           public Watchable,
                           public SharesMemory {
 public:
  DeviceProcessGroup(ProcessGroupPtr host, std::vector<ProcessGroupPtr> devices)
      : host_(std::move(host)), devices_(std::move(devices)) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  std::chrono::milliseconds timeout() const override { return host_->timeout(); }
  std::string backend_name() const override {
    return devices_.front()->backend_name() + "+" + host_->backend_name();
  }
  bool has_channels() const override { return devices_.size() > 1 && host_->has_channels(); }

  // Where ranks are out of step, collectives are queued that will never end.
  void close() noexcept override {
    const bool is_broken = std::uncaught_exceptions() > 0 || (watch() && watch()->has_failed());
    for (const ProcessGroupPtr& device : devices_) {
      auto* const abortable = capability<Abortable>(*device);
      if (is_broken && abortable) abortable->abort();
      tessera::close(device);
    }
    tessera::close(host_);
  }

  void set_watch(std::shared_ptr<CollectiveWatch> watch) override {
    std::vector<int> ranks(size());
    std::iota(ranks.begin(), ranks.end(), 0);
    for (size_t i = 0; i < devices_.size(); ++i) {
      auto* const watchable = capability<Watchable>(*devices_[i]);
      const std::string name = "device" + std::to_string(i);
      if (watch && watchable) watchable->set_watch(watch->part(name, ranks, /*is_inner=*/false));
    }
    if (auto* const watchable = capability<Watchable>(*host_))
      watchable->set_watch(std::move(watch));
  }
  const std::shared_ptr<CollectiveWatch>& watch() const override {
    static const std::shared_ptr<CollectiveWatch> kNone;
    const auto* const watchable = capability<Watchable>(*host_);
    return watchable ? watchable->watch() : kNone;
  }

  std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& tag) override {
    auto* const sharing = capability<SharesMemory>(*host_);
    return sharing ? sharing->share(nbytes, tag) : std::nullopt;
  }
  void release(const SharedBuffer& buffer) override {
    capability<SharesMemory>(*host_)->release(buffer);
  }

 private:
  WorkPtr issue(Collective collective) override {
    ProcessGroup& part = is_on_device(collective, size()) ? device(collective.tag.channel) : *host_;
    check_arguments(part, collective);
    return issue_on(part, std::move(collective));
  }

  ProcessGroup& device(Channel channel) const {
    return devices_.size() > 1 ? *devices_.at(static_cast<size_t>(channel)) : *devices_.front();
  }

  const ProcessGroupPtr host_;
  const std::vector<ProcessGroupPtr> devices_;  // by channel, or one for all
};

}  // namespace

ProcessGroupPtr device_process_group(ProcessGroupPtr host, std::vector<ProcessGroupPtr> devices) {
  TORCH_CHECK_VALUE(host != nullptr, "[device_process_group] `host` must be given");
  TORCH_CHECK_VALUE(devices.size() == 1 || devices.size() == 3,
                    "[device_process_group] `devices` must be one process group, or one for each "
                    "of 3 channels; got ",
                    devices.size());
  for (const ProcessGroupPtr& device : devices) {
    TORCH_CHECK_VALUE(device != nullptr, "[device_process_group] all `devices` must be given");
    TORCH_CHECK_VALUE(host->size() == device->size() && host->rank() == device->rank(),
                      "[device_process_group] `host` and `devices` must have the same ranks in the "
                      "same order; got rank ",
                      host->rank(), " of ", host->size(), " and rank ", device->rank(), " of ",
                      device->size());
  }
  return std::make_shared<DeviceProcessGroup>(std::move(host), std::move(devices));
}

}  // namespace tessera
