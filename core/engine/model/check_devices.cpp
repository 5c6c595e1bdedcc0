#include "engine/model/check_devices.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <map>
#include <string>

#include "base/device/device.h"
#include "comm/group/registered_backends.h"
#include "comm/start/host_identity.h"

namespace tessera {
namespace {

// Processes count the devices that such a variable leaves them.
std::string visible_devices() {
  std::string text;
  for (const char* name : {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
                           "ZE_AFFINITY_MASK"}) {
    const char* const value = std::getenv(name);
    text += fmt::format(" {}", value ? value : "all");
  }
  return text;
}

// c10d's Gloo carries tensors of devices through host memory, from any of them.
bool shares_devices(const ProcessGroup& process_group) {
  return process_group.size() == 1 || process_group.backend_name().starts_with("gloo");
}

}  // namespace

void check_devices(const ShardMesh& mesh, c10::Device device) {
  if (computes_on_host(device)) return;
  for (const ProcessGroup* ranks : {&mesh.shard(), &mesh.replicate()}) {
    TORCH_CHECK_VALUE(ranks->size() == 1 || ranks->device_type() != at::kCPU,
                      "[fully_shard] the parameters are on ", device, ", but ",
                      ranks->backend_name(),
                      " connects the ranks through host memory; name the device's backend: "
                      "init({.backend = ...}), with one of ",
                      fmt::format("{}", fmt::join(backend_names(), ", ")));
  }
  if (shares_devices(mesh.shard()) && shares_devices(mesh.replicate())) return;
  device = with_index(device);
  const auto identities = mesh.all_gather_bytes(
      fmt::format("{}{} {}", host_identity(), visible_devices(), device.str()),
      {"devices of ranks", Channel::kControl});
  std::map<std::string, size_t> owners;
  for (size_t rank = 0; rank < identities.size(); ++rank) {
    const auto [owner, is_first] = owners.emplace(identities[rank], rank);
    TORCH_CHECK_VALUE(is_first, "[fully_shard] each rank needs a device of its own, as ",
                      mesh.shard().backend_name(), " connects devices; ranks ", owner->second,
                      " and ", rank, " have their parameters on one (this rank's is ", device,
                      "). Choose device(", c10::DeviceTypeName(device.type(), /*lower_case=*/true),
                      ", World::local_rank()) for the model or the plan");
  }
}

}  // namespace tessera
