#include "comm/start/connect.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <type_traits>
#include <vector>

#include "comm/arena/arena_process_group.h"
#include "comm/arena/host_table.h"
#include "comm/arena/hosted_process_group.h"
#include "comm/group/capability.h"
#include "comm/group/collective_name.h"
#include "comm/group/environment.h"
#include "comm/group/interruption.h"
#include "comm/group/registered_backends.h"
#include "comm/message/addresses.h"
#include "comm/start/arrival.h"
#include "comm/start/authentic_store.h"
#include "comm/start/host_identity.h"
#include "comm/start/wait_report.h"
#include "comm/watch/datagrams.h"
#include "comm/watch/flight_file.h"
#include "comm/watch/watch.h"

namespace tessera {
namespace {

// Puts the arena over `gloo`, whose ranks find each other through `store`, if the transport allows
// it and it is available. `table`: null if all ranks are on one host. Collective.
ProcessGroupPtr with_arena(const ProcessGroupPtr& gloo,
                           const c10::intrusive_ptr<c10d::Store>& store,
                           const std::optional<HostTable>& table, const std::string& address,
                           Transport transport) {
  if (transport == Transport::kGloo) return gloo;
  const bool several_hosts = table && table->hosts() > 1;
  if (several_hosts && table->ranks_per_host() < 2) {
    const bool alone = table->ranks_per_host() == 1;
    const std::string why =
        alone ? "each rank has a host to itself" : "the hosts have unequal numbers of ranks";
    TORCH_CHECK_NOT_IMPLEMENTED(
        transport != Transport::kArena,
        "[init] transport kArena needs ranks that share a host, equally many on each; here, ", why);
    if (!alone && gloo->rank() == 0)
      LOG(INFO) << "[init] the ranks of a host do not share memory: " << why;
    return gloo;
  }
  try {
    const std::string key = AuthenticStore::key_of(store, "arena");
    return several_hosts ? hosted_process_group(gloo, store, *table, address, key)
                         : arena_process_group(gloo, key);
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

// Opens the socket through which the ranks of a world will watch each other; null if there can be
// none.
std::unique_ptr<Datagrams> open_socket(const RankInfo& info) {
  try {
    const bool is_local = info.source == "spawn" || info.local_size == info.size;
    return std::make_unique<Datagrams>(is_local ? loopback_address()
                                                : address_towards(info.master_addr));
  } catch (const std::exception& error) {
    LOG(WARNING) << "[init] rank " << info.rank
                 << " can't tell the others where it is, if it waits long: " << error.what();
    return nullptr;
  }
}

// The facts about this rank, for the others.
Arrival arrival_of(const Meeting& meeting, const Datagrams* socket) {
  const RankInfo& info = meeting.info;
  return {.rank = info.rank,
          .name = meeting.names.empty() ? info.rank : meeting.names[info.rank],
          .size = info.size,
          .local_size = info.local_size,
          .host = host_identity(),
          .host_name = host_name(),
          .pid = ::getpid(),
          .processes = process_space(),
          .transport = transport_name(meeting.transport),
          .backend = meeting.backend.empty() ? "gloo" : meeting.backend,
          .timeout = meeting.deadline.timeout().count(),
          .endpoint = Watch::endpoint_of(socket),
          .launched = meeting.launched};
}

std::vector<std::string> hosts_of(const std::vector<Arrival>& arrivals) {
  std::vector<std::string> hosts;
  for (const Arrival& arrival : arrivals) hosts.push_back(arrival.host);
  return hosts;
}

// Returns the address at which Gloo listens; empty: that of GLOO_SOCKET_IFNAME.
std::string gloo_address(const RankInfo& info, bool one_host) {
  if (one_host) return loopback_address();
  return environment("GLOO_SOCKET_IFNAME") ? "" : address_towards(info.master_addr);
}

// Connects the ranks, all of which are there. Collective.
ProcessGroupPtr join_all(const RankInfo& info, const Arrival& own, const Agreement& agreement,
                         const std::vector<std::string>& hosts,
                         const c10::intrusive_ptr<c10d::Store>& store,
                         const std::shared_ptr<CollectiveWatch>& watch) {
  const auto keys = c10::make_intrusive<c10d::PrefixStore>("world", store);
  const std::string address = gloo_address(info, agreement.one_host);
  ProcessGroupPtr process_group =
      gloo_process_group(keys, own.rank, own.size, agreement.timeout, address);
  std::optional<HostTable> table;
  if (!agreement.one_host) table.emplace(hosts);
  process_group = with_arena(process_group, keys, table, address, agreement.transport);
  if (const auto backend = find_backend(own.backend))
    process_group = with_backend(*backend, process_group, keys);
  if (auto* const watchable = capability<Watchable>(*process_group); watchable && watch)
    watchable->set_watch(watch);
  // No rank may leave, and close the store, while other ranks still connect.
  process_group->barrier({.subject = "world", .channel = Channel::kControl});
  return process_group;
}

// One meeting of ranks, from this rank's side.
class Gathering {
 public:
  Gathering(const Meeting& meeting, const std::string& function, const std::string& call)
      : meeting_(meeting),
        function_(function),
        call_(call),
        socket_(meeting.watch ? nullptr : open_socket(meeting.info)),
        attendance_(
            std::make_shared<Attendance>(arrival_of(meeting, socket_.get()), meeting.names)),
        report_(meeting.deadline) {}

  Connection connect() {
    const Agreement agreement = meet();
    const std::vector<std::string> hosts = hosts_of(attendance_->arrivals());
    const auto join = [info = meeting_.info, own = attendance_->own(), agreement, hosts,
                       store = meeting_.store, watch = watch_of_all()] {
      return join_all(info, own, agreement, hosts, store, watch);
    };
    // A device's backend may connect on the current device, of which each thread has its own.
    const auto joined = find_backend(attendance_->own().backend)
                            ? std::optional(explained<ProcessGroupPtr>(join))
                            : timed(join);
    return {.process_group = *joined, .transport = agreement.transport, .hosts = hosts};
  }

 private:
  // Returns the given watch, or begins that of a world, in which all ranks are there.
  std::shared_ptr<CollectiveWatch> watch_of_all() {
    if (meeting_.watch) return meeting_.watch;
    std::vector<std::string> endpoints;
    std::vector<int> ranks;
    for (const Arrival& arrival : attendance_->arrivals()) {
      endpoints.push_back(arrival.endpoint);
      ranks.push_back(arrival.rank);
    }
    const auto watch = Watch::start(std::move(socket_), meeting_.info.rank, endpoints,
                                    {.report_after = report_after(),
                                     .flight_folder = flight_folder(),
                                     .secret = AuthenticStore::key_of(meeting_.store, "watch")});
    return watch ? watch->group("world", ranks) : nullptr;
  }

  Agreement meet() {
    const auto arrived = [attendance = attendance_, store = meeting_.store,
                          deadline = meeting_.deadline] {
      Agreement agreement{.refusal = arrive(*attendance, *store, deadline)};
      if (agreement.refusal.empty()) agreement = agree(attendance->arrivals());
      return agreement;
    };
    Agreement agreement = *timed(arrived);
    if (!agreement.refusal.empty()) {
      leave();
      C10_THROW_ERROR(DistNetworkError, fmt::format("[{}] {} (seen by rank {})", function_,
                                                    agreement.refusal, attendance_->own().name));
    }
    if (attendance_->own().rank == 0)
      for (const std::string& warning : agreement.warnings)
        TORCH_WARN("[", function_, "] ", warning);
    return agreement;
  }

  // Leaves after a refusal. Not `timed()`: other ranks that were refused may end meanwhile.
  void leave() const {
    const auto left = [attendance = attendance_, store = meeting_.store,
                       deadline = meeting_.deadline] {
      try {
        leave_refused(*attendance, *store, deadline);
      } catch (const std::exception&) {  // rank 0 has left, and the store with it
      }
    };
    run_within(meeting_.deadline, left, [] {});
  }

  template <typename T>
  T explained(const std::function<T()>& fn) {
    try {
      return fn();
    } catch (const c10::NotImplementedError&) {
      throw;
    } catch (...) {
      fail(exception_text(std::current_exception()));
    }
  }

  // Returns the result of `fn`; throws if it is not there at the deadline.
  template <typename F>
  std::optional<std::invoke_result_t<F>> timed(const F& fn) {
    using Result = std::optional<std::invoke_result_t<F>>;
    Result result =
        explained<Result>([&] { return within(meeting_.deadline, fn, [this] { watch(); }); });
    if (!result) fail("");
    return result;
  }

  void watch() {
    report_.print_if_due([this](int64_t seconds) {
      if (!attendance_->is_first()) return std::string();
      const std::vector<int> missing = attendance_->missing();
      return fmt::format(
          "{} has waited {} s in {}() for {}; {}", attendance_->own_name(), seconds, function_,
          missing.empty() ? "connections to all ranks" : attendance_->describe(missing),
          attendance_->describe_present());
    });
    const std::string ended = attendance_->long_ended();
    TORCH_CHECK_WITH(DistNetworkError, ended.empty(), ended);
  }

  [[noreturn]] void fail(const std::string& cause) const {
    const auto seconds = [](auto duration) {
      return std::chrono::duration<double>(duration).count();
    };
    const std::vector<int> missing = attendance_->missing();
    const double waited = seconds(meeting_.deadline.waited());
    const std::string failure =
        missing.empty()
            ? fmt::format("could not connect to all other ranks in {:.1f} s{}", waited, addresses())
            : fmt::format("waited {:.1f} s in vain for {}", waited, attendance_->describe(missing));
    std::string text =
        fmt::format("[{}] {} {}, timeout {:.1f} s{}; expected all ranks to call {}; {}", function_,
                    attendance_->own_name(), failure, seconds(meeting_.deadline.timeout()), place(),
                    call_, attendance_->describe_present());
    for (const std::string& more : {attendance_->describe_halted(), cause})
      if (!more.empty() && text.find(more) == std::string::npos) text += "; " + more;
    C10_THROW_ERROR(DistNetworkError, text);
  }

  // Where the ranks listen to each other.
  std::string addresses() const {
    std::set<std::string> known;
    for (const Arrival& arrival : attendance_->arrivals())
      known.insert(arrival.endpoint.substr(0, arrival.endpoint.find(' ')));
    return fmt::format(" (tried {})", fmt::join(known, ", "));
  }

  std::string place() const {
    const RankInfo& info = meeting_.info;
    if (info.master_addr.empty()) return "";
    return fmt::format(", at {}:{} (MASTER_ADDR:MASTER_PORT)", info.master_addr, info.master_port);
  }

  const Meeting& meeting_;
  const std::string& function_;
  const std::string& call_;
  std::unique_ptr<Datagrams> socket_;  // of the watch; null if there is none
  const std::shared_ptr<Attendance> attendance_;
  WaitReport report_;
};

}  // namespace

Connection connect(const Meeting& meeting, const std::string& function, const std::string& call) {
  return interruptible([&] { return Gathering(meeting, function, call).connect(); });
}

}  // namespace tessera
