#pragma once

#include <cstdint>
#include <string>

namespace tessera::tools {

struct CkptBenchOptions {
  int ranks = 2;               ///< threads of this process
  int64_t megabytes = 512;     ///< stored by all ranks together
  int rounds = 6;              ///< turns of each kind, half of them in either order
  std::string directory = "";  ///< on the disk to measure; empty: the current one
  bool json = false;
};

/// Compares, in turns, saves and loads with files that are written and read as dd does, and the
/// time that an asynchronous save blocks with a copy of the same bytes in memory.
int bench_ckpt(const CkptBenchOptions& options);

}  // namespace tessera::tools
