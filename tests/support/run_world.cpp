#include "support/run_world.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace tessera {
namespace {

// What the rank threads and the thread that waits for them share.
struct Progress {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> returned;
  int first_failed_rank = -1;
  std::exception_ptr first_failure;

  void finish(int rank, std::exception_ptr failure) {
    std::lock_guard lock(mutex);
    returned[rank] = true;
    if (failure && !first_failure) {
      first_failure = failure;
      first_failed_rank = rank;
    }
    changed.notify_all();
  }
};

void run_rank(int rank, int size, const c10::intrusive_ptr<c10d::Store>& store,
              const std::function<void(World&)>& fn, std::chrono::milliseconds timeout,
              Progress& progress) {
  std::exception_ptr failure;
  try {
    World world = init(store, rank, size, {.timeout = timeout});
    try {
      fn(world);
    } catch (...) {
      // Noted before the world is closed: closing it makes the other ranks fail, too.
      progress.finish(rank, std::current_exception());
      throw;
    }
  } catch (...) {
    failure = std::current_exception();
  }
  progress.finish(rank, failure);
}

void abort_if_late(Progress& progress, std::chrono::milliseconds deadline) {
  std::unique_lock lock(progress.mutex);
  const auto all_returned = [&] {
    return std::all_of(progress.returned.begin(), progress.returned.end(),
                       [](bool r) { return r; });
  };
  if (progress.changed.wait_for(lock, deadline, all_returned)) {
    return;
  }
  std::string ranks;
  for (size_t rank = 0; rank < progress.returned.size(); ++rank) {
    if (!progress.returned[rank]) {
      ranks += " " + std::to_string(rank);
    }
  }
  std::fprintf(stderr, "[run_world] a rank hangs: after %.0f s these ranks have not returned:%s\n",
               std::chrono::duration<double>(deadline).count(), ranks.c_str());
  if (progress.first_failure) {
    try {
      std::rethrow_exception(progress.first_failure);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "[run_world] rank %d failed before: %s\n", progress.first_failed_rank,
                   error.what());
    }
  }
  std::abort();
}

[[noreturn]] void rethrow_with_rank(std::exception_ptr failure, int rank, int size) {
  const std::string where = "rank " + std::to_string(rank) + " of " + std::to_string(size);
  try {
    std::rethrow_exception(failure);
  } catch (c10::Error& error) {
    error.add_context("on " + where);
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error("[" + where + "] " + error.what());
  }
}

}  // namespace

void run_world(int size, const std::function<void(World&)>& fn, std::chrono::milliseconds timeout) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Progress progress;
  progress.returned.resize(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] { run_rank(rank, size, store, fn, timeout, progress); });
  }
  abort_if_late(progress,
                std::max<std::chrono::milliseconds>(10 * timeout, std::chrono::minutes(2)));
  for (auto& thread : ranks) {
    thread.join();
  }
  if (progress.first_failure) {
    rethrow_with_rank(progress.first_failure, progress.first_failed_rank, size);
  }
}

}  // namespace tessera
