#pragma once

#include <string>
#include <vector>

#include "launcher/flight_folder.h"
#include "launcher/job_end.h"
#include "launcher/terminal.h"

namespace tessera::tools {

/// Writes the news of one start of a job to the terminal, and traces to the folder.
class JobReport {
 public:
  JobReport(Terminal& terminal, FlightFolder& folder, int attempt)
      : terminal_(terminal), folder_(folder), attempt_(attempt) {}

  /// These ranks have written flight records because of SIGUSR1.
  void on_asked_flight(const std::vector<int>& ranks);
  /// All ranks have ended. Returns the exit status of the job.
  int on_end(const JobEnd& end, const std::vector<FlightReport>& flights);

 private:
  Terminal& terminal_;
  FlightFolder& folder_;
  int attempt_;
};

/// Writes a line of the launcher.
void say(Terminal& terminal, const std::string& text);

}  // namespace tessera::tools
