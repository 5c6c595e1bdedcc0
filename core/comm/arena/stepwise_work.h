#pragma once

#include <tessera/comm/process_group.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "comm/arena/arena.h"
#include "comm/group/collective_name.h"
#include "comm/message/job_thread.h"

namespace tessera {

/// Starts the collectives of one step of a collective and returns their works.
using CollectiveStep = std::function<std::vector<WorkPtr>(const CollectiveTag& tag)>;

/// The threads that run the steps of a channel's collectives.
struct StepThreads {
  JobThread begin;  ///< up to the start of the messages between hosts
  JobThread end;    ///< from their end
};

/// Starts a collective made of collectives of other process groups. Each step starts when the
/// previous one has completed; the caller of `wait()` completes the last one. Steps up to
/// `sends`, an index of `steps`, are started on `threads.begin`, later ones on `threads.end`: while
/// one collective sends, those behind it begin. If a thread is stopped meanwhile, waits in `arena`
/// end.
///
/// Throws `c10::DistBackendError` if `threads.begin` was stopped before.
WorkPtr run_stepwise(StepThreads& threads, CollectiveName name, std::chrono::milliseconds timeout,
                     std::shared_ptr<Arena> arena, std::vector<CollectiveStep> steps, size_t sends);

}  // namespace tessera
