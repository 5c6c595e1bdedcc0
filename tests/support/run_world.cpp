#include "support/run_world.h"

#include <tessera/comm/spawn.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>

#include "comm/start/host_identity.h"
#include "comm/start/spawned_rank.h"
#include "support/test_device.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

// Ends the program unless all ranks return in time.
class Watch {
 public:
  Watch(int size, milliseconds deadline) : deadline_(deadline) {
    for (int rank = 0; rank < size; ++rank) running_.insert(rank);
    thread_ = std::jthread([this] { abort_if_late(); });
  }

  ~Watch() {
    {
      const std::lock_guard lock(mutex_);
      running_.clear();
    }
    changed_.notify_all();
  }

  void returned(int rank) {
    const std::lock_guard lock(mutex_);
    running_.erase(rank);
  }

  void failed(int rank, const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = "rank " + std::to_string(rank) + ": " + why;
  }

 private:
  void abort_if_late() {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, deadline_, [&] { return running_.empty(); })) return;
    std::string ranks;
    for (const int rank : running_) ranks.append(" ").append(std::to_string(rank));
    std::fprintf(stderr, "[run_world] a rank hangs: after %.0f s these have not returned:%s\n",
                 std::chrono::duration<double>(deadline_).count(), ranks.c_str());
    if (!failure_.empty()) std::fprintf(stderr, "[run_world] before, %s\n", failure_.c_str());
    std::abort();
  }

  const milliseconds deadline_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<int> running_;
  std::string failure_;
  std::jthread thread_;
};

void run_ranks(int size, const std::function<void(World&)>& fn, milliseconds timeout,
               Transport transport, const std::function<int(int)>& host_of) {
  Watch watch(size, std::max<milliseconds>(10 * timeout, std::chrono::minutes(2)));
  const auto run = [&] {
    const int rank = SpawnedRank::current()->info().rank;
    std::optional<SimulatedHost> host;
    if (host_of) host.emplace("host " + std::to_string(host_of(rank)));
    try {
      testing::take_test_device(rank);
      World world =
          init({.timeout = timeout, .backend = testing::test_backend(), .transport = transport});
      fn(world);
    } catch (const std::exception& error) {
      watch.failed(rank, error.what());
      watch.returned(rank);
      throw;
    }
    watch.returned(rank);
  };
  try {
    spawn(size, run);
  } catch (...) {
    testing::forget_device_faults();  // of collectives that have missed the rank that failed
    throw;
  }
}

}  // namespace

void run_world(int size, const std::function<void(World&)>& fn, milliseconds timeout,
               std::optional<Transport> transport) {
  const char* const asked = std::getenv("TESSERA_TEST_TRANSPORT");
  const bool arena = asked && std::string_view(asked) == "arena";
  if (!transport) transport = arena ? Transport::kArena : Transport::kGloo;
  run_ranks(size, fn, timeout, *transport, nullptr);
}

void run_hosts(int size, const std::function<int(int)>& host_of,
               const std::function<void(World&)>& fn, milliseconds timeout, Transport transport) {
  run_ranks(size, fn, timeout, transport, host_of);
}

}  // namespace tessera
