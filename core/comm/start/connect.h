#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/comm/world.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/group/collective_watch.h"
#include "comm/start/deadline.h"
#include "comm/start/rank_processes.h"

namespace tessera {

/// The place where ranks find each other, and the means that connect them.
struct Meeting {
  RankInfo info;  ///< this rank's place among the ranks that meet
  c10::intrusive_ptr<c10d::Store> store;
  std::string backend;
  Transport transport = Transport::kAuto;
  Deadline deadline;       ///< of the meeting; its timeout is that of all later waits
  std::vector<int> names;  ///< ranks of the world, by rank of those that meet; empty: 0, 1, ...
  RankProcesses launched;  ///< of a world that a launcher has started
  std::shared_ptr<CollectiveWatch> watch;  ///< of those that meet, in a world; null: they are one
};

/// The result of a meeting.
struct Connection {
  ProcessGroupPtr process_group;
  Transport transport = Transport::kAuto;  ///< on which the ranks agreed
  std::vector<std::string> hosts;          ///< by rank
};

/// Connects the ranks that find each other through `meeting.store`. Collective: all ranks return,
/// or fail, together, and each within a second after the deadline. Reports regularly for which
/// ranks it waits.
///
/// Throws `c10::DistNetworkError` in the name of `function`, saying that all ranks must call
/// `call`, if some do not arrive in time, or if they do not agree on world size, backend or
/// transport, and `c10::NotImplementedError` on all ranks if the agreed transport is kArena and the
/// arena is not available.
Connection connect(const Meeting& meeting, const std::string& function, const std::string& call);

}  // namespace tessera
