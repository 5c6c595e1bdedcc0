#pragma once

#include <vector>

namespace tessera::tools {

/// The cores that this process may use.
struct Cores {
  std::vector<int>
      ids;         ///< neighbours (hardware threads of one core, cores of one socket) adjacent
  int usable = 1;  ///< their number, or less where a control group limits the CPU time
};
Cores available_cores();

/// Returns the cores of `rank`: `ids.size() / ranks` of them, no two ranks sharing one.
std::vector<int> core_slice(const std::vector<int>& ids, int rank, int ranks);

/// Keeps the calling thread on one core. Returns false if it may not use that one.
bool stay_on_core(int core);

}  // namespace tessera::tools
