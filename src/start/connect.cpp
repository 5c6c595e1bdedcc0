#include "start/connect.h"

#include <c10/util/Exception.h>

#include <exception>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "group/collective_name.h"
#include "start/transport.h"

namespace tessera {
namespace {

ProcessGroupPtr make_process_group(const Meeting& meeting) {
  const RankInfo& info = meeting.info;
  const auto keys = c10::make_intrusive<c10d::PrefixStore>("world", meeting.store);
  if (meeting.backend == "nccl") {
    return nccl_process_group(keys, info.rank, info.size, meeting.timeout);
  }
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
    C10_THROW_ERROR(DistNetworkError, "[" + function + "] rank " + std::to_string(info.rank) +
                                          " of " + std::to_string(info.size) +
                                          " could not connect to all other ranks; expected all of "
                                          "them to call " +
                                          call + ": " + exception_text(std::current_exception()));
  }
}

}  // namespace tessera
