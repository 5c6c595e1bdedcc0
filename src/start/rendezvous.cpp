#include "start/rendezvous.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "group/collective_name.h"
#include "group/environment.h"

namespace tessera {
namespace {

c10::intrusive_ptr<c10d::Store> tcp_store(const RankInfo& info, std::chrono::milliseconds timeout) {
  const bool agent_serves = environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(info.master_port);
  options.isServer = info.rank == 0 && !agent_serves;
  options.numWorkers = static_cast<size_t>(info.size);
  options.waitWorkers = false;
  options.timeout = timeout / 2;  // for connecting, which is tried twice
  auto store = c10::make_intrusive<c10d::TCPStore>(info.master_addr, options);
  store->setTimeout(timeout);
  if (!agent_serves) store->waitForWorkers();
  return store;
}

thread_local std::string simulated_host;

}  // namespace

std::string host_identity() {
  if (!simulated_host.empty()) return simulated_host;
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  std::array<char, 64> network{};
  const ssize_t length = readlink("/proc/self/ns/net", network.data(), network.size() - 1);
  return fmt::format("{} {} {}", name.data(), boot_id, length > 0 ? network.data() : "");
}

SimulatedHost::SimulatedHost(std::string name) { simulated_host = std::move(name); }
SimulatedHost::~SimulatedHost() { simulated_host.clear(); }

c10::intrusive_ptr<c10d::Store> rendezvous_store(const RankInfo& info,
                                                 std::chrono::milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  c10::intrusive_ptr<c10d::Store> store;
  try {
    store = tcp_store(info, timeout);
  } catch (...) {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    C10_THROW_ERROR(
        DistNetworkError,
        fmt::format(
            "[init] rank {} of {} did not reach the rendezvous at {}:{} (MASTER_ADDR:MASTER_PORT) "
            "in {:.1f} s, timeout {:.1f} s; expected rank 0 to serve it and all ranks to come; "
            "c10d said: {}",
            info.rank, info.size, info.master_addr, info.master_port, waited.count(),
            std::chrono::duration<double>(timeout).count(),
            exception_text(std::current_exception())));
  }
  const auto attempt = environment({"TESSERA_RESTART", "TORCHELASTIC_RESTART_COUNT"}).value_or("0");
  return c10::make_intrusive<c10d::PrefixStore>("tessera/attempt_" + attempt, store);
}

void compare_hosts(c10d::Store& store, RankInfo& info, std::chrono::milliseconds timeout) {
  const auto key = [](int r) { return "host_of_rank_" + std::to_string(r); };
  const std::string own = host_identity();
  store.set(key(info.rank), own);
  info.local_rank = info.local_size = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int r = 0; r < info.size; ++r) {
    const auto elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - start);
    try {
      store.wait({key(r)}, std::max(timeout - elapsed, std::chrono::milliseconds(1)));
    } catch (...) {
      C10_THROW_ERROR(
          DistNetworkError,
          fmt::format("[init] rank {} of {} waited {:.1f} s for rank {} to call init(); "
                      "the store said: {}",
                      info.rank, info.size, std::chrono::duration<double>(timeout).count(), r,
                      exception_text(std::current_exception())));
    }
    if (store.get_to_str(key(r)) == own) {
      info.local_size += 1;
      info.local_rank += r < info.rank ? 1 : 0;
    }
  }
}

c10::intrusive_ptr<c10d::Store> fresh_store(const c10::intrusive_ptr<c10d::Store>& store,
                                            int size) {
  // init() ends with a barrier: no rank joins again before all have joined.
  const int64_t round = (store->add("tessera/joined", 1) - 1) / size;
  return c10::make_intrusive<c10d::PrefixStore>("tessera/round_" + std::to_string(round), store);
}

}  // namespace tessera
