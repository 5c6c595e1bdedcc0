#include <c10/util/Exception.h>
#include <tessera/process_group.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "device/device.h"
#include "group/capability.h"
#include "group/collective.h"
#include "group/collective_watch.h"

namespace tessera {
namespace {

bool is_on_device(const Collective& collective) {
  bool result = false;
  std::visit(
      [&](const auto& call) {
        for_each_tensor(call, [&](const at::Tensor& tensor, bool /*is_written*/) {
          result = result || (tensor.defined() && !is_host(tensor.device()));
        });
      },
      collective.call);
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
  DeviceProcessGroup(ProcessGroupPtr host, ProcessGroupPtr device)
      : host_(std::move(host)), device_(std::move(device)) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  std::chrono::milliseconds timeout() const override { return host_->timeout(); }
  std::string backend_name() const override {
    return device_->backend_name() + "+" + host_->backend_name();
  }
  bool has_channels() const override { return device_->has_channels() && host_->has_channels(); }

  void close() noexcept override {
    tessera::close(device_);
    tessera::close(host_);
  }

  void set_watch(std::shared_ptr<CollectiveWatch> watch) override {
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
    ProcessGroup& part = is_on_device(collective) ? *device_ : *host_;
    check_arguments(part, collective);
    return issue_on(part, std::move(collective));
  }

  const ProcessGroupPtr host_;
  const ProcessGroupPtr device_;
};

}  // namespace

ProcessGroupPtr device_process_group(ProcessGroupPtr host, ProcessGroupPtr device) {
  TORCH_CHECK_VALUE(host && device, "[device_process_group] `host` and `device` must be given");
  TORCH_CHECK_VALUE(host->size() == device->size() && host->rank() == device->rank(),
                    "[device_process_group] `host` and `device` must have the same ranks in the same order; got "
                    "rank ", host->rank(), " of ", host->size(), " and rank ", device->rank(), " of ",
                    device->size());
  return std::make_shared<DeviceProcessGroup>(std::move(host), std::move(device));
}

}  // namespace tessera
