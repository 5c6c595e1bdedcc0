#include "start/transport.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include <functional>
#include <string>
#include <utility>

#include "arena/host_table.h"
#include "arena/hosted_process_group.h"
#include "group/environment.h"
#include "start/rendezvous.h"

namespace tessera {
namespace {

// Returns `make()`, or `process_group` if that is not available and not required.
ProcessGroupPtr try_to(const std::function<ProcessGroupPtr()>& make,
                       const ProcessGroupPtr& process_group, Transport transport) {
  try {
    return make();
  } catch (const c10::NotImplementedError& error) {
    if (transport == Transport::kArena) throw;
    if (process_group->rank() == 0) {
      TORCH_WARN(
          "[tessera] the ranks of a host talk over TCP, which is slower than shared memory: ",
          error.what_without_backtrace(), ". Set TESSERA_TRANSPORT=gloo if this is meant to be so");
    }
    return process_group;
  }
}

ProcessGroupPtr over_hosts(ProcessGroupPtr process_group,
                           const c10::intrusive_ptr<c10d::Store>& store, const HostTable& table,
                           Transport transport) {
  if (table.ranks_per_host() >= 2) {
    return try_to([&] { return hosted_process_group(process_group, store, table); }, process_group,
                  transport);
  }
  const bool alone = table.ranks_per_host() == 1;
  const std::string why =
      alone ? "each rank has a host to itself" : "the hosts have unequal numbers of ranks";
  TORCH_CHECK_NOT_IMPLEMENTED(transport != Transport::kArena,
                              "[init] transport kArena needs ranks that share a host, equally many on "
                              "each; here, ", why);
  if (!alone && process_group->rank() == 0)
    LOG(INFO) << "[init] the ranks of a host do not share memory: " << why;
  return process_group;
}

}  // namespace

Transport transport_of(const WorldOptions& options) {
  const auto name = environment("TESSERA_TRANSPORT").value_or("auto");
  TORCH_CHECK_VALUE(name == "auto" || name == "gloo" || name == "arena",
                    "[init] TESSERA_TRANSPORT must be gloo, arena or auto; got '", name, "'");
  if (options.transport != Transport::kAuto || name == "auto") return options.transport;
  return name == "gloo" ? Transport::kGloo : Transport::kArena;
}

ProcessGroupPtr with_arena(ProcessGroupPtr process_group,
                           const c10::intrusive_ptr<c10d::Store>& store, bool one_host,
                           Transport transport) {
  if (transport == Transport::kGloo) return process_group;
  if (!one_host) {
    const HostTable table(
        all_gather_bytes(*process_group, host_identity(), {"hosts", Channel::kControl}));
    if (table.hosts() > 1) return over_hosts(std::move(process_group), store, table, transport);
  }
  return try_to([&] { return arena_process_group(process_group); }, process_group, transport);
}

}  // namespace tessera
