#pragma once

#include <tessera/comm/world.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// A process that a launcher has started as a rank: the rank itself, or a shell around it.
struct RankProcess {
  int rank = 0;
  int64_t pid = 0;
  uint64_t command = 0;  ///< equal for the same program with the same arguments

  bool operator==(const RankProcess&) const = default;
};

/// The processes that the launcher of this rank has started on this host as ranks of its job.
struct RankProcesses {
  int64_t own = 0;               ///< that of this rank; 0: unknown
  std::vector<RankProcess> all;  ///< `own`, too; empty: unknown
};

/// Finds them by the environments that processes were started with (`RANK`, `WORLD_SIZE`,
/// `MASTER_ADDR`, `MASTER_PORT`). Knows nothing of ranks with a launcher that gives its job a name
/// that no other job has, and of ranks whose variables are set inside the program.
RankProcesses processes_of_launcher(const RankInfo& info);

/// Returns why rank `other`, with process `pid`, is of another job than the rank whose launcher
/// started `known`: as that rank it has started another process. Empty if nothing contradicts: a
/// launcher may start some ranks, or one, of a job.
std::string contradiction_of(const RankProcesses& known, int other, int64_t pid);

}  // namespace tessera
