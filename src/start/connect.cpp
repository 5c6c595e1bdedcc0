#include "start/connect.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <fmt/format.h>

#include <exception>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "arena/host_table.h"
#include "arena/hosted_process_group.h"
#include "group/collective_name.h"
#include "start/rendezvous.h"

namespace tessera {
namespace {

// Puts the arena over `gloo`, whose ranks find each other through `store`, if the transport allows
// it and it is available. `one_host`: the ranks are known to be on one host. Collective.
ProcessGroupPtr with_arena(const ProcessGroupPtr& gloo,
                           const c10::intrusive_ptr<c10d::Store>& store, bool one_host,
                           Transport transport) {
  if (transport == Transport::kGloo) return gloo;
  std::optional<HostTable> table;
  if (!one_host)
    table.emplace(all_gather_bytes(*gloo, host_identity(), {"hosts", Channel::kControl}));
  const bool several_hosts = table && table->hosts() > 1;
  if (several_hosts && table->ranks_per_host() < 2) {
    const bool alone = table->ranks_per_host() == 1;
    const std::string why =
        alone ? "each rank has a host to itself" : "the hosts have unequal numbers of ranks";
    TORCH_CHECK_NOT_IMPLEMENTED(transport != Transport::kArena,
                                "[init] transport kArena needs ranks that share a host, equally many on "
                                "each; here, ", why);
    if (!alone && gloo->rank() == 0)
      LOG(INFO) << "[init] the ranks of a host do not share memory: " << why;
    return gloo;
  }
  try {
    return several_hosts ? hosted_process_group(gloo, store, *table) : arena_process_group(gloo);
  } catch (const c10::NotImplementedError& error) {
    if (transport == Transport::kArena) throw;
    if (gloo->rank() == 0) {
      TORCH_WARN(
          "[tessera] the ranks of a host communicate over TCP, which is slower than shared "
          "memory: ",
          error.what_without_backtrace(), ". Set TESSERA_TRANSPORT=gloo if this is intended");
    }
    return gloo;
  }
}

ProcessGroupPtr make_process_group(const Meeting& meeting) {
  const RankInfo& info = meeting.info;
  const auto keys = c10::make_intrusive<c10d::PrefixStore>("world", meeting.store);
  if (meeting.backend == "nccl")
    return nccl_process_group(keys, info.rank, info.size, meeting.timeout);
  const bool one_host = info.local_size == info.size;
  return with_arena(
      gloo_process_group(keys, info.rank, info.size, meeting.timeout, one_host ? "127.0.0.1" : ""),
      keys, one_host, meeting.transport);
}

}  // namespace

ProcessGroupPtr connect(const Meeting& meeting, const std::string& function,
                        const std::string& call) {
  try {
    ProcessGroupPtr process_group = make_process_group(meeting);
    // No rank may leave, and close the store, while other ranks still connect.
    process_group->barrier({.subject = "world", .channel = Channel::kControl});
    return process_group;
  } catch (const c10::NotImplementedError&) {
    throw;
  } catch (...) {
    const RankInfo& info = meeting.info;
    C10_THROW_ERROR(DistNetworkError,
                    fmt::format("[{}] rank {} of {} could not connect to all other ranks; expected "
                                "all of them to call {}: {}",
                                function, info.rank, info.size, call,
                                exception_text(std::current_exception())));
  }
}

}  // namespace tessera
