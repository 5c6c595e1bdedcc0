#include "comm/group/registered_backends.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "base/device/device.h"
#include "comm/group/collective_name.h"

namespace tessera {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, RegisteredBackend> backends = {{"nccl", nccl_backend()}};
};

Registry& registry() {
  static Registry result;
  return result;
}

}  // namespace

std::optional<RegisteredBackend> find_backend(const std::string& name) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.backends.find(name);
  return found == all.backends.end() ? std::nullopt : std::optional(found->second);
}

std::vector<std::string> backend_names() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::vector<std::string> names;
  for (const auto& [name, backend] : all.backends) names.push_back(name);
  return names;
}

// One for each channel, as a backend matches collectives by their order. NCCL connects the ranks
// only when one is used.
ProcessGroupPtr with_backend(const RegisteredBackend& backend, const ProcessGroupPtr& host,
                             const c10::intrusive_ptr<c10d::Store>& store) {
  std::vector<ProcessGroupPtr> devices;
  for (const Channel channel : {Channel::kParams, Channel::kGrads, Channel::kControl}) {
    const auto keys = c10::make_intrusive<c10d::PrefixStore>(
        "device " + std::string(channel_name(channel)), store);
    devices.push_back(
        backend_process_group(backend.make(keys, host->rank(), host->size(), host->timeout()),
                              host->timeout(), backend.device));
  }
  return device_process_group(host, std::move(devices));
}

void register_backend(const std::string& name, c10::DeviceType device, BackendFactory make) {
  TORCH_CHECK_VALUE(!name.empty() && name != "gloo",
                    "[register_backend] `name` must be a name other than gloo; got '", name, "'");
  TORCH_CHECK_VALUE(!is_host(device),
                    "[register_backend] `device` must be the type of an accelerator; got ", device);
  TORCH_CHECK_VALUE(make != nullptr, "[register_backend] `make` must be given");
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.backends[name] = {device, std::move(make)};
}

ProcessGroupPtr registered_process_group(const std::string& name,
                                         const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int size, std::chrono::milliseconds timeout) {
  const auto backend = find_backend(name);
  TORCH_CHECK_VALUE(backend, "[registered_process_group] `name` must be a registered backend (",
                    fmt::format("{}", fmt::join(backend_names(), ", ")), "); got '", name, "'");
  const auto keys = c10::make_intrusive<c10d::PrefixStore>("host", store);
  return with_backend(*backend, gloo_process_group(keys, rank, size, timeout), store);
}

}  // namespace tessera
