#pragma once

#include <functional>
#include <vector>

#include "differential/training.h"

/// Worlds in which ranks train, and read what others have saved.
namespace tessera::differential {

using Traces = std::vector<Trace>;  // by rank

/// Runs `fn` on ranks that are threads.
void run_threads(int ranks, Transport transport,
                 const std::function<void(int rank, const World& world)>& fn);

/// Trains on ranks that are processes. The caller has no threads.
Traces train_in_processes(const Program& program);

/// Reads what a program has saved at its end, on `reload_ranks` ranks at `reload_level`.
Traces reload(const Program& program);

}  // namespace tessera::differential
