#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::tools {

/// How a rank ended.
struct RankEnd {
  int rank = 0;
  int status = 0;  ///< exit status, or the signal that killed it
  bool killed = false;
  bool dumped_core = false;
  bool out_of_memory = false;    ///< the kernel killed a process for its memory meanwhile
  bool after_interrupt = false;  ///< a signal had been passed on before
  bool by_launcher = false;      ///< the launcher had ended the ranks before
  int stopped_by = 0;            ///< the signal that had stopped it when the first rank failed
  bool has_last_words = true;    ///< false: it wrote nothing to stderr after the first failure
  std::vector<std::string> last_lines;  ///< of its stderr, oldest first
  bool ends_the_output = false;         ///< nothing was shown after its last line

  bool failed() const { return killed || status != 0; }
  /// Returns the exit status that a shell would show.
  int exit_status() const { return killed ? 128 + status : status; }
};

/// How all ranks ended.
struct JobEnd {
  std::vector<RankEnd> ranks;   ///< those that have ended, in the order of time
  int64_t memory_kills = 0;     ///< `memory_kills()` at the start, and those of `ranks`
  int interrupted_by = 0;       ///< the first signal that asked the launcher to end
  std::vector<pid_t> immortal;  ///< ranks that still exist after SIGKILL
};

}  // namespace tessera::tools
