#pragma once

#include <tessera/comm/world.h>

#include <chrono>
#include <functional>
#include <optional>

namespace tessera {

/// The transports of ranks on one host, and what a test is called over one.
constexpr Transport kTransports[] = {Transport::kGloo, Transport::kArena};
constexpr auto transport_of_test = [](const auto& info) {
  return info.param == Transport::kArena ? "Arena" : "Gloo";
};

/// Runs `fn` on `size` ranks of `spawn()`, each with a world that is the default one in `fn`. Every
/// wait has `timeout`.
///
/// Ranks talk over `transport`; without it over Gloo, whose messages tests count, unless the
/// environment has TESSERA_TEST_TRANSPORT=arena. Each has a `test_device()` of its own.
///
/// Failures are those of `spawn()`. A rank that never returns ends the whole test program with a
/// message that names it, since a thread can't be killed.
void run_world(int size, const std::function<void(World&)>& fn,
               std::chrono::milliseconds timeout = std::chrono::seconds(30),
               std::optional<Transport> transport = std::nullopt);

/// As `run_world()`, over `transport`.
inline void run_over(Transport transport, int size, const std::function<void(World&)>& fn,
                     std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  run_world(size, fn, timeout, transport);
}

/// As `run_world()`, over the arena of one host.
inline void run_arena(int size, const std::function<void(World&)>& fn,
                      std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  run_over(Transport::kArena, size, fn, timeout);
}

/// As `run_world()`, over the arena; rank `r` is on host `host_of(r)`, as far as the ranks can
/// tell.
void run_hosts(int size, const std::function<int(int rank)>& host_of,
               const std::function<void(World&)>& fn,
               std::chrono::milliseconds timeout = std::chrono::seconds(30),
               Transport transport = Transport::kArena);

/// Ways to put ranks on hosts of two, or on two hosts.
inline int by_halves(int rank) { return rank / 2; }
inline int by_turns(int rank) { return rank % 2; }

}  // namespace tessera
