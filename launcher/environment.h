#pragma once

#include <string>
#include <vector>

#include "launcher/launch.h"

namespace tessera::tools {

/// One rank among those that are started together.
struct RankAssignment {
  int rank = 0;
  int ranks = 1;
  int port = 0;     ///< where rank 0 listens
  int attempt = 0;  ///< 0, then 1 after the first restart
  int threads = 1;  ///< for OpenMP

  int first_rank = 0;   ///< of this host
  int local_ranks = 0;  ///< on this host; 0: all
  std::string master = "127.0.0.1";
  std::string job;     ///< the text that the ranks of a job share
  std::string secret;  ///< by which they know each other; empty: that of this process, if any
  std::string flight_folder;  ///< where ranks write their flight records; empty: nowhere
};

/// Returns the environment of a rank, as NAME=value: this process's, with the launcher's variables.
std::vector<std::string> rank_environment(const LaunchOptions& options,
                                          const RankAssignment& assignment);

}  // namespace tessera::tools
