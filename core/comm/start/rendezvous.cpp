#include "comm/start/rendezvous.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "comm/group/collective_name.h"
#include "comm/group/environment.h"
#include "comm/message/addresses.h"
#include "comm/message/broken_pipe.h"
#include "comm/message/rank_sockets.h"
#include "comm/start/job_secret.h"
#include "comm/start/job_token.h"
#include "comm/start/store_key.h"
#include "comm/start/store_listener.h"
#include "comm/start/wait_report.h"

namespace tessera {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

const char* const kJobKey = "tessera/job";

bool agent_serves() { return environment("TORCHELASTIC_USE_AGENT_STORE") == "True"; }

std::string address_of(const RankInfo& info) {
  return fmt::format("{}:{} (MASTER_ADDR:MASTER_PORT)", info.master_addr, info.master_port);
}

// The sockets of this process that belong to the store: rank 0's listening one, and connections.
std::vector<int> sockets_of_store(const RankInfo& info) {
  std::vector<int> sockets;
  for (const int fd : open_descriptors()) {
    const auto ports = tcp_ports_of(fd);
    if (ports && (ports->local == info.master_port || ports->peer == info.master_port))
      sockets.push_back(fd);
  }
  return sockets;
}

// Returns true if a server has accepted a connection of this process.
bool is_connected(const RankInfo& info) {
  return std::ranges::any_of(sockets_of_store(info),
                             [&](int fd) { return tcp_ports_of(fd)->peer == info.master_port; });
}

// Makes the store. `listener`: rank 0's socket, -1 on ranks that do not serve. May take any time: a
// stranger's server that answers nothing keeps c10d in `recv`.
c10::intrusive_ptr<c10d::TCPStore> tcp_store(const RankInfo& info, const Deadline& deadline,
                                             int listener) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(info.master_port);
  options.isServer = listener >= 0;
  if (listener >= 0) options.masterListenFd = listener;
  options.multiTenant = true;  // torch.distributed, which has the same port, joins the server
  options.numWorkers = static_cast<size_t>(info.size);
  options.waitWorkers = false;  // see arrive()
  // Half for each of two tries to connect; c10d counts whole seconds.
  options.timeout = std::max<milliseconds>(deadline.left() / 2, std::chrono::seconds(1));
  survive_broken_pipes();  // a visitor may close at any time
  auto store = c10::make_intrusive<c10d::TCPStore>(numeric_loopback(info.master_addr), options);
  store->setTimeout(deadline.timeout());
  keep_from_children(sockets_of_store(info));
  return store;
}

// Compares the token of this rank's job with that of the rank that serves the store. Returns an
// error, or an empty text.
std::string compare_tokens(c10d::Store& store, const RankInfo& info, bool serves,
                           const Deadline& deadline) {
  const std::string own = job_token(info);
  if (serves) store.set(kJobKey, "job " + own);
  TORCH_CHECK_WITH(DistStoreError, wait_for_key(store, kJobKey, deadline, info.size),
                   "the store there has no job of Tessera");
  const std::string theirs = store.get_to_str(kJobKey).substr(4);
  if (may_be_one_job(own, theirs)) return "";
  const auto shown = [](const std::string& token) {
    return token.empty() ? "none" : "'" + token + "'";
  };
  return fmt::format(
      "{} is served by another job: expected job token {}, got {}. Give each job another "
      "MASTER_PORT; or, if these are ranks of one job, give all of them one TESSERA_JOB",
      address_of(info), shown(own), shown(theirs));
}

// A restart has its own keys: torchrun's agent keeps the store.
StorePtr store_of_attempt(StorePtr store) {
  const auto attempt = environment({"TESSERA_RESTART", "TORCHELASTIC_RESTART_COUNT"}).value_or("0");
  return c10::make_intrusive<c10d::PrefixStore>("tessera/attempt_" + attempt, std::move(store));
}

struct StoreOrRefusal {
  StorePtr store;
  std::string refusal;
};

[[noreturn]] void throw_not_reached(const RankInfo& info, const Deadline& deadline,
                                    const std::string& cause) {
  C10_THROW_ERROR(
      DistNetworkError,
      fmt::format(
          "[init] rank {} of {} did not reach the rendezvous at {} in {:.1f} s, timeout {:.1f} "
          "s; expected rank 0 to serve it and all ranks to come; {}",
          info.rank, info.size, address_of(info), deadline.waited().count(),
          std::chrono::duration<double>(deadline.timeout()).count(), cause));
}

// Returns the store, or null if the deadline passes.
std::optional<StoreOrRefusal> make_store(const RankInfo& info, const Deadline& deadline) {
  const bool serves = info.rank == 0 && !agent_serves();
  const int listener = serves ? open_store_listener(info) : -1;
  const auto make = [info, deadline, listener, serves] {
    StoreOrRefusal made;
    const StorePtr store = tcp_store(info, deadline, listener);
    // torchrun's agent serves no other job.
    if (!agent_serves()) made.refusal = compare_tokens(*store, info, serves, deadline);
    if (made.refusal.empty()) made.store = with_secret(store_of_attempt(store), info, deadline);
    return made;
  };
  WaitReport report(deadline);
  return within(deadline, make, [&] {
    report.print_if_due([&](int64_t seconds) {
      return fmt::format("rank {} of {} has waited {} s in init() for the rendezvous at {}",
                         info.rank, info.size, seconds, address_of(info));
    });
  });
}

}  // namespace

StorePtr rendezvous_store(const RankInfo& info, const Deadline& deadline) {
  std::optional<StoreOrRefusal> made;
  try {
    made = make_store(info, deadline);
  } catch (const c10::ValueError&) {
    throw;
  } catch (...) {
    throw_not_reached(info, deadline, "c10d said: " + exception_text(std::current_exception()));
  }
  if (!made)
    throw_not_reached(
        info, deadline,
        is_connected(info)
            ? "a server accepts connections there, but does not answer as the store of "
              "a job of Tessera: another service has this port"
            : "no server accepts connections there");
  if (!made->refusal.empty())
    C10_THROW_ERROR(DistNetworkError,
                    fmt::format("[init] {} (rank {} of {})", made->refusal, info.rank, info.size));
  return made->store;
}

void refuse_new_clients(const RankInfo& info) {
  for (const int fd : sockets_of_store(info))
    if (is_listening(fd)) ignore_new_connections(fd);
}

StorePtr fresh_store(const StorePtr& store, int size) {
  // init() ends with a barrier: no rank joins again before all have joined.
  const int64_t round = (store->add("tessera/joined", 1) - 1) / size;
  return c10::make_intrusive<c10d::PrefixStore>("tessera/round_" + std::to_string(round), store);
}

}  // namespace tessera
