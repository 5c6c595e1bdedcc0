#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/child.h"
#include "launcher/environment.h"
#include "launcher/event_wait.h"
#include "launcher/flight_folder.h"
#include "launcher/guardian.h"
#include "launcher/job_end.h"
#include "launcher/job_report.h"
#include "launcher/launch.h"
#include "launcher/rank_stream.h"
#include "launcher/signal_pipe.h"
#include "launcher/terminal.h"

namespace tessera::tools {

/// One start of all ranks of this host: an event loop until all of them have ended.
class Job {
 public:
  struct Setup {
    RankAssignment assignment;            ///< shared by all ranks; `rank` is filled in
    std::vector<std::vector<int>> cores;  ///< of each rank; empty: not bound
  };
  struct Surroundings {
    Terminal& terminal;
    SignalPipe& signals;
    FlightFolder& flights;
    Guardian& guardian;
    JobReport& report;
  };
  Job(const LaunchOptions& options, Setup setup, Surroundings surroundings);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// Throws `ExecError` or `std::system_error` if a rank can't be started; then no rank runs.
  JobEnd run();

  /// Returns the ranks of this host.
  std::vector<int> ranks() const;

 private:
  enum class Phase {
    kRunning,
    kInterrupted,  ///< a signal was passed on; ranks may still save their state
    kFailing,      ///< a rank failed; the others get a moment to report errors
    kTerminating,  ///< SIGTERM was sent
    kKilling,      ///< SIGKILL was sent
    kGivenUp,      ///< SIGKILL did not help
  };
  struct Rank {
    pid_t pid = -1;
    bool ended = false;  ///< seen as ended; not reaped while its process group may be signalled
    std::unique_ptr<RankStream> out;
    std::unique_ptr<RankStream> err;
    size_t bytes_before_failure = 0;  ///< of stderr, at the first failure
    int stopped_by = 0;               ///< the signal that had stopped it then
  };

  void start_ranks();
  StreamOptions stream_options(int rank, bool is_err) const;
  bool any_running() const;

  // Handle events while it runs.
  void handle_events(Clock::time_point until);
  void on_signal(int signal);
  void on_rank_end(RankEnd end);
  void on_deadline();
  void look_for_ended_ranks();
  void extend_last_words();
  void look_for_flights();
  void report_late_flights();

  void enter(Phase phase, std::chrono::milliseconds duration);
  void signal_ranks(int signal);
  void end_process_groups();
  void finish_output();

  const LaunchOptions& options_;
  Setup setup_;
  Terminal& terminal_;
  SignalPipe& signals_;
  FlightFolder& flights_;
  JobReport& report_;
  Guardian& guardian_;
  std::vector<Rank> ranks_;
  Phase phase_ = Phase::kRunning;
  Clock::time_point deadline_ = Clock::time_point::max();
  Clock::time_point last_words_end_;  ///< the latest end of `Phase::kFailing`
  Clock::time_point last_news_;       ///< when a rank last wrote to stderr or ended, in that phase
  size_t bytes_heard_ = 0;            ///< of stderr, of all ranks
  std::optional<Clock::time_point> flights_due_;  ///< when those that were asked for are shown
  int interrupts_ = 0;
  JobEnd end_;
};

}  // namespace tessera::tools
