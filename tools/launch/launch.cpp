#include "launch/launch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "launch/cores.h"
#include "launch/job.h"
#include "launch/reserved_port.h"

namespace tessera::tools {
namespace {

void say(Terminal& terminal, std::string_view text) {
  terminal.write_from(nullptr, STDERR_FILENO, fmt::format("tessera run: {}\n", text));
}

std::string signal_text(int signal) {
  const char* name = ::sigdescr_np(signal);
  return fmt::format("signal {} ({})", signal, name != nullptr ? name : "unknown");
}

std::string describe(const RankEnd& end) {
  if (!end.killed) return fmt::format("exit status {}", end.status);
  return fmt::format("killed by {}{}", signal_text(end.status),
                     end.dumped_core ? ", core dumped" : "");
}

/// If the caller closed 0, 1 or 2, a pipe that gets that number would be mistaken for it.
void open_standard_fds() {
  int fd = 0;
  do {
    fd = ::open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd > STDERR_FILENO) ::close(fd);
}

/// Reports errors, the most important one last, and returns the exit status.
int report(const JobEnd& end, Terminal& terminal) {
  for (pid_t pid : end.immortal) {
    say(terminal, fmt::format("process {} is still there after SIGKILL", pid));
  }
  if (end.interrupted_by != 0 && end.interrupted_by != SIGPIPE) {
    say(terminal, fmt::format("interrupted by {}", signal_text(end.interrupted_by)));
  }
  if (!end.first_failure) return end.immortal.empty() ? 0 : 1;
  const RankEnd& failure = *end.first_failure;
  const int status = failure.killed ? 128 + failure.status : failure.status;
  if (failure.after_interrupt && failure.killed) return 128 + end.interrupted_by;
  if (!end.last_lines.empty()) {
    say(terminal, fmt::format("the last lines that rank {} wrote to stderr:", failure.rank));
    for (const std::string& line : end.last_lines) {
      terminal.write_from(nullptr, STDERR_FILENO, fmt::format("    {}\n", line));
    }
  }
  say(terminal, fmt::format("rank {} failed first: {}", failure.rank, describe(failure)));
  return status;
}

/// Writes the queued output. A signal ends the wait for a reader that does not read.
void flush(Terminal& terminal, SignalPipe& signals) {
  while (terminal.pending()) {
    pollfd polled[] = {{terminal.next_fd(), POLLOUT, 0}, {signals.fd(), POLLIN, 0}};
    if (::poll(polled, 2, -1) < 0) continue;
    if (polled[0].revents != 0) terminal.write_some();
    if (polled[1].revents == 0) continue;
    for (int signal : signals.take()) {
      if (signal == SIGINT || signal == SIGTERM || signal == SIGHUP) return;
    }
  }
}

/// The parts of the job that all its starts share.
struct Plan {
  int ranks = 1;
  int threads = 1;
  std::vector<std::vector<int>> cores;
};

Plan make_plan(const LaunchOptions& options, Terminal& terminal) {
  const Cores cores = available_cores();
  Plan plan{.ranks = options.ranks > 0 ? options.ranks : cores.usable};
  plan.threads = std::max(1, cores.usable / plan.ranks);
  const int count = static_cast<int>(cores.ids.size());
  // If a control group grants less time than there are cores, other programs use those cores, too.
  const bool fits = plan.ranks <= cores.usable && cores.usable == count;
  if (options.binding == Binding::kNone || (options.binding == Binding::kAuto && !fits))
    return plan;
  if (plan.ranks > count) {
    say(terminal, fmt::format("not bound to cores: {} ranks, {} cores", plan.ranks, count));
    return plan;
  }
  for (int rank = 0; rank < plan.ranks; ++rank) {
    plan.cores.push_back(core_slice(cores.ids, rank, plan.ranks));
  }
  return plan;
}

/// Starts the ranks, and starts them again if they fail and restarts are left.
int run_with_restarts(const LaunchOptions& options, const Plan& plan, Terminal& terminal,
                      SignalPipe& signals) {
  for (int attempt = 0;; ++attempt) {
    const ReservedPort port(options.master_port);
    const RankAssignment assignment{
        .ranks = plan.ranks, .port = port.number(), .attempt = attempt, .threads = plan.threads};
    if (attempt > 0) {
      say(terminal, fmt::format("restart {} of {}: starting all {} ranks again, port {}", attempt,
                                options.max_restarts, plan.ranks, assignment.port));
    }
    const JobEnd end = Job(options, {assignment, plan.cores}, terminal, signals).run();
    const int status = report(end, terminal);
    if (end.interrupted_by == SIGPIPE) return 128 + SIGPIPE;
    const bool restarts = status != 0 && end.interrupted_by == 0 && end.immortal.empty() &&
                          attempt < options.max_restarts;
    if (!restarts) return status;
  }
}

/// While an object lives, processes whose parents ended become children of this process: it can
/// then reap them and see that a rank's process group has ended, even if process 1 reaps nothing.
class Subreaper {
 public:
  Subreaper() {
    ::prctl(PR_GET_CHILD_SUBREAPER, &previous_);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  ~Subreaper() { ::prctl(PR_SET_CHILD_SUBREAPER, previous_); }
  Subreaper(const Subreaper&) = delete;
  Subreaper& operator=(const Subreaper&) = delete;

 private:
  int previous_ = 0;
};

int checked_launch(const LaunchOptions& options, Terminal& terminal, SignalPipe& signals) try {
  if (!options.log_dir.empty()) std::filesystem::create_directories(options.log_dir);
  return run_with_restarts(options, make_plan(options, terminal), terminal, signals);
} catch (const ExecError& error) {
  say(terminal, error.what());
  return error.error == ENOENT ? 127 : 126;
} catch (const std::exception& error) {
  say(terminal, error.what());
  return 1;
}

}  // namespace

int launch(const LaunchOptions& options) {
  if (options.command.empty() || options.ranks < 0) {
    fmt::print(stderr, "tessera run: no program to run, or a negative number of ranks\n");
    return 2;
  }
  open_standard_fds();
  const Subreaper subreaper;
  SignalPipe signals;
  Terminal terminal;
  const int status = checked_launch(options, terminal, signals);
  flush(terminal, signals);
  return status;
}

}  // namespace tessera::tools
