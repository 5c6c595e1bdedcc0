#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/event_wait.h"
#include "launcher/host_connection.h"
#include "launcher/job_report.h"
#include "launcher/remote_command.h"

namespace tessera::tools {

/// How the ranks of all hosts ended.
struct HostJobEnd {
  JobEnd job;
  MergedFlight flight;
  std::string error;  ///< not empty: a launcher could not start its ranks, for this reason
  int error_status = 1;
};

/// One start of all ranks on all hosts: an event loop until all connections have ended.
class HostJob {
 public:
  HostJob(const HostsOptions& options, HostsStart start, Terminal& terminal, SignalPipe& signals,
          JobReport& report);

  HostJobEnd run();

 private:
  enum class Phase {
    kRunning,
    kInterrupted,  ///< a signal was passed on; the launchers there end their ranks in time
    kFailing,      ///< a rank failed or a host was lost; the others get a moment to report errors
    kEnding,       ///< the launchers there were told to end their ranks
    kKilled,       ///< the connections were killed
  };

  void start_connections();
  bool any_open() const;

  void on_signal(int signal);
  void on_message(HostConnection& connection, UplinkMessage message);
  void on_failure(const RankEnd& end);
  void on_host_end(HostConnection& connection, const UplinkMessage& message);
  void on_failing();
  void on_deadline();
  void look_for_ended_connections();
  void extend_last_words();
  void look_for_asked_flight();

  void enter(Phase phase, std::chrono::milliseconds duration);
  void end_all_hosts();
  /// Returns the longest time in which a launcher there ends its ranks, once it was told to.
  std::chrono::milliseconds time_to_end() const;
  double seconds() const;

  const HostsOptions& options_;
  HostsStart start_;
  Terminal& terminal_;
  SignalPipe& signals_;
  JobReport& report_;
  std::vector<std::unique_ptr<HostConnection>> connections_;
  Phase phase_ = Phase::kRunning;
  Clock::time_point started_ = Clock::now();
  Clock::time_point deadline_ = Clock::time_point::max();
  Clock::time_point last_words_end_;  ///< the latest end of `Phase::kFailing`
  Clock::time_point last_news_;       ///< when something last came over stderr, in that phase
  size_t bytes_heard_ = 0;            ///< over stderr, from all hosts
  int interrupts_ = 0;

  Clock::time_point asked_until_ = Clock::time_point::max();  ///< flight records are awaited
  size_t answers_ = 0;                                        ///< hosts that have sent theirs
  MergedFlight asked_;
  HostJobEnd end_;
};

}  // namespace tessera::tools
