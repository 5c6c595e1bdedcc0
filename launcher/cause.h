#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/flight_folder.h"
#include "launcher/job_end.h"

namespace tessera::tools {

/// The first cause of a failure.
struct Cause {
  const RankEnd* rank = nullptr;   ///< the rank that is the cause, if it has ended
  const RankEnd* first = nullptr;  ///< another rank that failed first in time
  std::string text;
  int status = 1;  ///< the exit status of the job
};

/// Returns the cause: the first rank that a signal killed, other than SIGABRT, and that blames no
/// other; else the first that was stopped when others failed; else, if all failed alike, the one
/// that was in another step; else the rank that the flight records blame; else the rank that failed
/// first. Nothing if none failed.
std::optional<Cause> cause_of(const JobEnd& end, const std::vector<FlightReport>& flights);

/// Returns "exit status 3", say.
std::string describe(const RankEnd& end);

/// Returns the number and the description of a signal.
std::string signal_text(int signal);

}  // namespace tessera::tools
