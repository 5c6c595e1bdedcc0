#pragma once

#include <cstdint>
#include <string>

namespace tessera::tools {

struct CkptBenchOptions {
  int ranks = 2;               ///< threads of this process
  int64_t megabytes = 512;     ///< that all ranks store together
  int rounds = 6;              ///< turns of each kind, half of them in either order
  std::string directory = "";  ///< on the disk to measure; empty: the current one
  bool json = false;
};

/// Saves and loads against files that are written and read as dd does, and what an asynchronous
/// save blocks for against a copy of the same bytes in memory, in turns.
int bench_ckpt(const CkptBenchOptions& options);

}  // namespace tessera::tools
