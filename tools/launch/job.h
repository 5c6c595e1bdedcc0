#pragma once

#include <poll.h>

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/child.h"
#include "launch/environment.h"
#include "launch/guardian.h"
#include "launch/launch.h"
#include "launch/rank_stream.h"
#include "launch/signal_pipe.h"
#include "launch/terminal.h"

namespace tessera::tools {

/// How a rank ended.
struct RankEnd {
  int rank = 0;
  int status = 0;  ///< exit status, or the signal that killed it
  bool killed = false;
  bool dumped_core = false;
  bool after_interrupt = false;  ///< a signal had been passed on before
};

/// How all ranks ended.
struct JobEnd {
  std::optional<RankEnd> first_failure;  ///< in time
  std::deque<std::string> last_lines;    ///< of the stderr of that rank
  int interrupted_by = 0;                ///< the first signal that asked the launcher to end
  std::vector<pid_t> immortal;           ///< ranks that still exist after SIGKILL
};

/// One start of all ranks: an event loop until all of them have ended.
class Job {
 public:
  struct Setup {
    RankAssignment assignment;            ///< shared by all ranks; `rank` is filled in
    std::vector<std::vector<int>> cores;  ///< of each rank; empty: not bound
  };
  Job(const LaunchOptions& options, Setup setup, Terminal& terminal, SignalPipe& signals);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// Throws `ExecError` or `std::system_error` if a rank can't be started; then no rank runs.
  JobEnd run();

 private:
  using Clock = std::chrono::steady_clock;
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
  };

  void start_ranks();
  StreamOptions stream_options(int rank, bool is_err) const;
  bool any_running() const;

  // Handle events while it runs.
  void wait_for_events(Clock::time_point until);
  void on_signal(int signal);
  void on_rank_end(const RankEnd& end);
  void on_deadline();
  void look_for_ended_ranks();

  void enter(Phase phase, std::chrono::milliseconds duration);
  void signal_ranks(int signal);
  void end_process_groups();
  void finish_output();

  const LaunchOptions& options_;
  Setup setup_;
  Terminal& terminal_;
  SignalPipe& signals_;
  Guardian guardian_;
  std::vector<Rank> ranks_;
  Phase phase_ = Phase::kRunning;
  Clock::time_point deadline_ = Clock::time_point::max();
  int interrupts_ = 0;
  JobEnd end_;
};

}  // namespace tessera::tools
