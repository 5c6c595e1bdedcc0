#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <tessera/comm/spawn.h>
#include <tessera/comm/world.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/start/rank_generator.h"
#include "comm/start/spawned_rank.h"

namespace tessera {
namespace {

using SpawnedRanks = std::vector<std::shared_ptr<SpawnedRank>>;

void check(int ranks, const std::function<void()>& fn, const SpawnOptions& options) {
  TORCH_CHECK_VALUE(ranks >= 1, "[spawn] `ranks` must be at least 1; got ", ranks);
  TORCH_CHECK_VALUE(fn != nullptr, "[spawn] `fn` must be given");
  TORCH_CHECK_VALUE(options.threads_per_rank >= 0,
                    "[spawn] `threads_per_rank` must not be negative; got ",
                    options.threads_per_rank);
  if (const SpawnedRank* rank = SpawnedRank::current()) {
    TORCH_CHECK(false, "[spawn] must not be called by a rank that was spawned; this is rank ",
                rank->info().rank, " of ", rank->info().size);
  }
  const RankInfo process = rank_info_from_environment();
  TORCH_CHECK(process.size == 1,
              "[spawn] must be called in a process that is not itself a rank; this one is rank ",
              process.rank, " of ", process.size, " (", process.source,
              "). Start it without a launcher, or train without spawn()");
}

void run_rank(const std::shared_ptr<SpawnedRank>& rank, int threads,
              const std::function<void()>& fn) {
  const c10::DebugInfoGuard current(SpawnedRank::kind(), rank);
  const c10::impl::IncludeDispatchKeyGuard draws(kRankKey);
  // Autocast's cache of weights is one for all threads, and is cleared when any of them leaves
  // autocast: then weights that another rank uses twice would have two casts there, and one here.
  at::autocast::set_autocast_cache_enabled(false);
  try {
    at::set_num_threads(threads);
    fn();
  } catch (...) {
    rank->fail(std::current_exception());
  }
}

// Returns when all ranks have returned. LibTorch has a number of threads for each thread, but new
// threads begin with the number that was set last.
void run_ranks(SpawnedWorld& world, const SpawnedRanks& ranks, int threads,
               const std::function<void()>& fn) {
  const auto restore =
      c10::make_scope_exit([before = at::get_num_threads()] { at::set_num_threads(before); });
  std::vector<std::jthread> started;  // which have ended when that runs
  try {
    for (const auto& rank : ranks) {
      started.emplace_back([&] { run_rank(rank, threads, fn); });
    }
  } catch (...) {
    world.store->fail("a thread could not be started");
    throw;
  }
}

void rethrow_first_failure(const SpawnedRanks& ranks) {
  const SpawnedRank* first = nullptr;
  for (const auto& rank : ranks) {
    if (rank->failure() && (!first || rank->failed_after() < first->failed_after()))
      first = rank.get();
  }
  if (!first) return;
  const RankInfo info = first->info();
  const std::string where = c10::str("rank ", info.rank, " of ", info.size);
  try {
    std::rethrow_exception(first->failure());
  } catch (c10::Error& error) {
    error.add_context("on " + where);
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error("[" + where + "] " + error.what());
  }
}

}  // namespace

void spawn(int ranks, const std::function<void()>& fn, const SpawnOptions& options) {
  check(ranks, fn, options);
  static std::mutex running;  // the process also has one default generator
  const std::unique_lock alone(running, std::try_to_lock);
  TORCH_CHECK(alone,
              "[spawn] only one may run at a time; the spawn() of another thread has not returned");
  register_rank_generator();
  const int share = std::max(1, at::get_num_threads() / ranks);
  const GeneratorSeal seal;
  const auto world = std::make_shared<SpawnedWorld>(ranks, seal.seed());
  SpawnedRanks spawned;
  for (int rank = 0; rank < ranks; ++rank) {
    spawned.push_back(std::make_shared<SpawnedRank>(world, rank, copy_of(seal.before())));
  }
  run_ranks(*world, spawned, options.threads_per_rank > 0 ? options.threads_per_rank : share, fn);
  rethrow_first_failure(spawned);
}

}  // namespace tessera
