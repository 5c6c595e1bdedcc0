#pragma once

#include <string>
#include <vector>

#include "launch/launch.h"

namespace tessera::tools {

/// One rank among those that are started together.
struct RankAssignment {
  int rank = 0;
  int ranks = 1;
  int port = 0;     ///< where rank 0 listens
  int attempt = 0;  ///< 0, then 1 after the first restart
  int threads = 1;  ///< for OpenMP
};

/// Returns the environment of a rank, as NAME=value: this process's, with the launcher's variables.
std::vector<std::string> rank_environment(const LaunchOptions& options,
                                          const RankAssignment& assignment);

}  // namespace tessera::tools
