#pragma once

#include <tessera/export.h>

#include <functional>

namespace tessera {

/// How `spawn()` starts its ranks.
struct SpawnOptions {
  /// Threads that operators of one rank may use (`at::set_num_threads`). 0: an equal share of those
  /// that the calling thread may use, at least one.
  int threads_per_rank = 0;
};

/// Runs `fn` on `ranks` ranks that are threads of this process, and waits until all have returned.
///
/// `fn` is the program of each process of a job: it calls `tessera::init()` to join the other
/// threads, and trains.
///
/// ```cpp
/// tessera::spawn(4, [] {
///   auto world = tessera::init();
///   train(world);
/// });
/// ```
///
/// A rank behaves like a process, except that process-wide state, such as the working directory,
/// standard output and LibTorch's default dtype, are shared. Each rank draws its own random
/// numbers, see `manual_seed()` in <tessera/base/generator.h>. Autocast does not keep its casts of
/// weights on these threads, since LibTorch has one cache of them for all threads of a process.
///
/// When ranks fail, the first failure in time is thrown here after all ranks have returned. Its
/// message names the rank; a `c10::Error` keeps its type, any other `std::exception` becomes a
/// `std::runtime_error`. The waits of the other ranks fail once the failed rank's `World` is
/// destroyed, so keep it in `fn`. If a rank returns without calling `init()` while others call it,
/// these wait until their timeout.
///
/// Throws `c10::ValueError` if `ranks` is not positive, and `c10::Error` inside a rank of another
/// `spawn()`, while another one runs on another thread, and in a process that is already one of
/// several ranks.
TESSERA_API void spawn(int ranks, const std::function<void()>& fn,
                       const SpawnOptions& options = {});

}  // namespace tessera
