#pragma once

#include <sys/types.h>

#include <string>

#include "launcher/unique_fd.h"

namespace tessera::tools {

/// A small process that kills the ranks' process groups, and removes their empty folder for flight
/// records, if this process dies without doing so.
///
/// PR_SET_PDEATHSIG alone reaches a rank, but not the processes that the rank has started.
class Guardian {
 public:
  Guardian(int ranks, const std::string& folder);
  ~Guardian();
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  /// Registers `process_group` as that of `rank` of this host; 0: it has ended.
  void set(int rank, pid_t process_group);

 private:
  UniqueFd to_guardian_;
  pid_t pid_ = -1;
};

}  // namespace tessera::tools
