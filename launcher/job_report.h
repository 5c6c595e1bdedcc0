#pragma once

#include <string>

#include "launcher/flight_folder.h"
#include "launcher/flight_record.h"
#include "launcher/job_end.h"
#include "launcher/terminal.h"

namespace tessera::tools {

/// Receives the news of one start of a job.
class JobReport {
 public:
  virtual ~JobReport() = default;
  /// A rank has failed, just now.
  virtual void on_failure(const RankEnd& end) = 0;
  /// Ranks have written flight records because of SIGUSR1.
  virtual void on_asked_flight(const MergedFlight& flight) = 0;
  /// All ranks have ended. Returns the exit status of the job.
  virtual int on_end(const JobEnd& end, const MergedFlight& flight) = 0;
};

/// Writes the news to the terminal, and traces to the folder.
class TerminalReport final : public JobReport {
 public:
  TerminalReport(Terminal& terminal, FlightFolder& folder, int attempt)
      : terminal_(terminal), folder_(folder), attempt_(attempt) {}

  void on_failure(const RankEnd& /*end*/) override {}  // told at the end
  void on_asked_flight(const MergedFlight& flight) override;
  int on_end(const JobEnd& end, const MergedFlight& flight) override;

 private:
  void show(const MergedFlight& flight);

  Terminal& terminal_;
  FlightFolder& folder_;
  int attempt_;
};

/// Writes a line of the launcher.
void say(Terminal& terminal, const std::string& text);

}  // namespace tessera::tools
