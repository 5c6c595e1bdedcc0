#include "launcher/job.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <numeric>
#include <optional>

#include "launcher/last_words.h"
#include "launcher/memory_kills.h"

namespace tessera::tools {
namespace {

using std::chrono::milliseconds;

/// A rank that computes writes its flight record at once; one that is stopped never does.
constexpr milliseconds kRecordWait{2000};
constexpr milliseconds kLookInterval{50};

std::string prefix_of(int rank, bool is_err) {
  const bool coloured =
      ::isatty(is_err ? STDERR_FILENO : STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  constexpr int kColours[] = {36, 32, 33, 35, 34, 96, 92, 93};
  return coloured ? fmt::format("\033[{}m[{}]\033[0m ", kColours[rank % 8], rank)
                  : fmt::format("[{}] ", rank);
}

/// Returns how `pid` ended, without reaping it: its process group must keep its number.
std::optional<RankEnd> end_of(int rank, pid_t pid) {
  siginfo_t info{};
  if (::waitid(P_PID, pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) {
    return std::nullopt;
  }
  return RankEnd{.rank = rank,
                 .status = info.si_status,
                 .killed = info.si_code != CLD_EXITED,
                 .dumped_core = info.si_code == CLD_DUMPED};
}

/// Returns the signal by which `pid` is stopped now; 0 if it is not.
int stop_of(pid_t pid) {
  siginfo_t info{};
  const bool stopped = ::waitid(P_PID, pid, &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 &&
                       info.si_pid != 0 && info.si_code == CLD_STOPPED;
  return stopped ? info.si_status : 0;
}

/// Reaps processes that a rank started and this process adopted; not the rank itself.
void reap_adopted(pid_t process_group) {
  siginfo_t info{};
  while (::waitid(P_PGID, process_group, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid != 0 && info.si_pid != process_group) {
    ::waitpid(info.si_pid, nullptr, 0);
    info = {};
  }
}

/// Order of blame for ranks that were found dead together: a crash comes before an error exit or an
/// abort: ranks end so when they lose a peer.
int blame(const RankEnd& end) {
  if (end.killed && end.status != SIGABRT) return 0;
  return end.killed || end.status != 0 ? 1 : 2;
}

}  // namespace

Job::Job(const LaunchOptions& options, Setup setup, Surroundings surroundings)
    : options_(options),
      setup_(std::move(setup)),
      terminal_(surroundings.terminal),
      signals_(surroundings.signals),
      flights_(surroundings.flights),
      report_(surroundings.report),
      guardian_(surroundings.guardian) {}

Job::~Job() {
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const pid_t pid = ranks_[i].pid;
    if (pid <= 0) continue;  // an exception interrupted the start
    ::kill(-pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    guardian_.set(static_cast<int>(i), 0);
  }
}

JobEnd Job::run() {
  end_.memory_kills = memory_kills();
  start_ranks();
  while (any_running() && phase_ != Phase::kGivenUp) {
    handle_events(flights_due_ ? std::min(deadline_, Clock::now() + kLookInterval) : deadline_);
    extend_last_words();
    look_for_flights();
    if (Clock::now() >= deadline_) on_deadline();
  }
  end_process_groups();
  finish_output();
  report_late_flights();
  return std::move(end_);
}

std::vector<int> Job::ranks() const {
  std::vector<int> result(setup_.assignment.local_ranks);
  std::iota(result.begin(), result.end(), setup_.assignment.first_rank);
  return result;
}

void Job::start_ranks() {
  for (const int rank : ranks()) {
    const int index = rank - setup_.assignment.first_rank;
    RankAssignment assignment = setup_.assignment;
    assignment.rank = rank;
    ChildOptions child_options{.command = options_.command,
                               .environment = rank_environment(options_, assignment)};
    if (!setup_.cores.empty()) child_options.cores = setup_.cores[index];
    // Ranks are no foreground job: one that reads the terminal would be stopped.
    child_options.inherit_stdin = rank == 0 && ::isatty(STDIN_FILENO) == 0;
    Child child = start_child(child_options);
    guardian_.set(index, child.pid);
    Rank& started = ranks_.emplace_back();
    started.pid = child.pid;
    started.out =
        std::make_unique<RankStream>(std::move(child.out), stream_options(rank, false), terminal_);
    started.err =
        std::make_unique<RankStream>(std::move(child.err), stream_options(rank, true), terminal_);
  }
}

StreamOptions Job::stream_options(int rank, bool is_err) const {
  StreamOptions result;
  if (!options_.quiet || rank == 0) result.terminal_fd = is_err ? STDERR_FILENO : STDOUT_FILENO;
  if (options_.prefix) result.prefix = prefix_of(rank, is_err);
  if (!options_.log_dir.empty()) {
    result.log_path = fmt::format("{}/rank_{}.{}", options_.log_dir, rank, is_err ? "err" : "out");
    if (setup_.assignment.attempt > 0) {
      result.log_header =
          fmt::format("--- tessera run: restart {} ---\n", setup_.assignment.attempt);
    }
  }
  if (options_.on_stdout && !is_err) {
    result.on_line = [this, rank](std::string_view line) { options_.on_stdout(rank, line); };
  }
  return result;
}

bool Job::any_running() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return !rank.ended; });
}

void Job::handle_events(Clock::time_point until) {
  std::vector<RankStream*> streams;
  for (Rank& rank : ranks_) {
    streams.push_back(rank.out.get());
    streams.push_back(rank.err.get());
  }
  for (const int signal : wait_for_events(signals_, terminal_, streams, until)) on_signal(signal);
  if (terminal_.broken() && options_.log_dir.empty() && end_.interrupted_by == 0) {
    end_.interrupted_by = SIGPIPE;  // as for any program whose reader has ended
    signal_ranks(SIGTERM);
    enter(Phase::kTerminating, options_.grace);
  }
}

void Job::on_signal(int signal) {
  switch (signal) {
    case SIGCHLD:
      look_for_ended_ranks();
      return;
    case SIGTSTP:  // Ctrl-Z: the ranks stop and continue with the launcher
      signal_ranks(SIGTSTP);
      ::raise(SIGSTOP);
      signal_ranks(SIGCONT);
      return;
    case SIGUSR1:
      signal_ranks(signal);
      flights_due_ = Clock::now() + kRecordWait;
      return;
    case SIGUSR2:
      signal_ranks(signal);
      return;
    default:
      break;
  }
  if (end_.interrupted_by == 0) end_.interrupted_by = signal;
  if (signal == SIGINT && ++interrupts_ > 1) {
    signal_ranks(SIGKILL);
    enter(Phase::kKilling, kKillTime);
    return;
  }
  signal_ranks(signal);
  if (phase_ == Phase::kRunning) enter(Phase::kInterrupted, options_.interrupt_grace);
}

void Job::look_for_ended_ranks() {
  std::vector<RankEnd> ends;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].ended || ranks_[i].pid <= 0) continue;
    reap_adopted(ranks_[i].pid);
    if (const auto end =
            end_of(setup_.assignment.first_rank + static_cast<int>(i), ranks_[i].pid)) {
      ranks_[i].ended = true;
      ends.push_back(*end);
    }
  }
  std::stable_sort(ends.begin(), ends.end(),
                   [](const RankEnd& a, const RankEnd& b) { return blame(a) < blame(b); });
  for (const RankEnd& end : ends) on_rank_end(end);
}

void Job::on_rank_end(RankEnd end) {
  end.after_interrupt = end_.interrupted_by != 0;
  end.by_launcher = phase_ >= Phase::kTerminating;
  const bool may_lack_memory = end.killed && end.status == SIGKILL && !end.by_launcher;
  end.out_of_memory = may_lack_memory && memory_kills() > end_.memory_kills;
  if (end.out_of_memory) ++end_.memory_kills;
  end_.ranks.push_back(end);
  if (!end.failed()) return;
  if (phase_ == Phase::kFailing) {
    last_news_ = Clock::now();
  } else if (phase_ == Phase::kRunning) {
    for (Rank& rank : ranks_) {
      rank.bytes_before_failure = rank.err->bytes();
      if (!rank.ended) rank.stopped_by = stop_of(rank.pid);
    }
    last_words_end_ = Clock::now() + std::min(kLastWords, options_.grace);
    last_news_ = Clock::now();
    enter(Phase::kFailing, std::min(kSilence, options_.grace));
  }
}

void Job::extend_last_words() {
  if (phase_ != Phase::kFailing) return;
  size_t heard = 0;
  for (const Rank& rank : ranks_) heard += rank.err->bytes();
  if (heard != bytes_heard_) last_news_ = Clock::now();
  bytes_heard_ = heard;
  deadline_ = std::min(last_news_ + std::min(kSilence, options_.grace), last_words_end_);
}

void Job::look_for_flights() {
  if (!flights_due_) return;
  std::vector<int> running;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].ended) running.push_back(setup_.assignment.first_rank + static_cast<int>(i));
  }
  const bool all_wrote = flights_.new_records(running).size() == running.size();
  if (running.empty() || (Clock::now() < *flights_due_ && !all_wrote)) return;
  flights_due_.reset();
  report_.on_asked_flight(flights_.take_asked(ranks()));
}

void Job::on_deadline() {
  switch (phase_) {
    case Phase::kInterrupted:
    case Phase::kFailing:
      signal_ranks(SIGTERM);
      enter(Phase::kTerminating, options_.grace);
      return;
    case Phase::kTerminating:
      signal_ranks(SIGKILL);
      enter(Phase::kKilling, kKillTime);
      return;
    default:
      phase_ = Phase::kGivenUp;
  }
}

/// Ranks that were asked for flight records may end well before the answer was awaited.
void Job::report_late_flights() {
  const bool failed = std::any_of(end_.ranks.begin(), end_.ranks.end(),
                                  [](const RankEnd& end) { return end.failed(); });
  if (!flights_due_ || failed) return;  // after a failure the records are read anyway
  const std::vector<int> asked = flights_.take_asked(ranks());
  if (!asked.empty()) report_.on_asked_flight(asked);
}

void Job::enter(Phase phase, milliseconds duration) {
  phase_ = phase;
  deadline_ = Clock::now() + duration;
}

void Job::signal_ranks(int signal) {
  for (const Rank& rank : ranks_) {
    if (rank.pid <= 0) continue;
    ::kill(-rank.pid, signal);
    // A stopped rank could not act on the signal.
    if (signal != SIGTSTP) ::kill(-rank.pid, SIGCONT);
  }
}

/// Reaps the ranks, and ends the processes that they started and left behind.
void Job::end_process_groups() {
  signal_ranks(SIGTERM);
  std::vector<pid_t> left;
  for (Rank& rank : ranks_) {
    if (rank.ended) {
      ::waitpid(rank.pid, nullptr, 0);
      left.push_back(rank.pid);
    } else {
      end_.immortal.push_back(rank.pid);
    }
  }
  const auto kill_at = Clock::now() + options_.grace;
  const auto give_up_at = kill_at + kKillTime;
  bool killed = false;
  while (Clock::now() < give_up_at) {
    std::erase_if(left, [](pid_t process_group) {
      reap_adopted(process_group);
      return ::kill(-process_group, 0) != 0;
    });
    if (left.empty()) break;
    if (!killed && Clock::now() >= kill_at) {
      for (pid_t process_group : left) ::kill(-process_group, SIGKILL);
      killed = true;
    }
    handle_events(Clock::now() + milliseconds(20));
  }
  for (size_t i = 0; i < ranks_.size(); ++i) {
    guardian_.set(static_cast<int>(i), 0);
    ranks_[i].pid = -1;
  }
}

void Job::finish_output() {
  for (Rank& rank : ranks_) {
    rank.out->finish();
    rank.err->finish();
  }
  for (RankEnd& end : end_.ranks) {
    const Rank& rank = ranks_[end.rank - setup_.assignment.first_rank];
    end.last_lines.assign(rank.err->last_lines().begin(), rank.err->last_lines().end());
    end.ends_the_output = rank.err->ends_the_output();
    end.stopped_by = rank.stopped_by;
    end.has_last_words = !end.by_launcher || rank.err->bytes() > rank.bytes_before_failure;
  }
}

}  // namespace tessera::tools
