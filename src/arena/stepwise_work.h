#pragma once

#include <tessera/process_group.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "arena/arena.h"
#include "group/collective_name.h"
#include "message/job_thread.h"

namespace tessera {

/// Starts the collectives of one step of a collective and returns their works.
using CollectiveStep = std::function<std::vector<WorkPtr>(const CollectiveTag& tag)>;

/// Starts a collective made of collectives of other process groups. On `thread`, each step starts
/// when the previous one has completed; the caller of `wait()` completes the last step. If `thread`
/// is stopped meanwhile, waits in `arena` end.
///
/// Throws `c10::DistBackendError` if `thread` was stopped before.
WorkPtr run_stepwise(JobThread& thread, CollectiveName name, std::chrono::milliseconds timeout,
                     std::shared_ptr<Arena> arena, std::vector<CollectiveStep> steps);

}  // namespace tessera
