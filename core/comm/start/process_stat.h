#pragma once

#include <cstdint>
#include <optional>

namespace tessera {

/// What the system tells of a process of this host.
struct ProcessStat {
  char state = 0;  ///< as in /proc: 'T' stopped, 't' stopped by a debugger, ...
  int64_t parent = 0;
};

/// Returns nothing for a process that has ended, even if its parent does not know yet.
std::optional<ProcessStat> process_stat(int64_t pid);

}  // namespace tessera
