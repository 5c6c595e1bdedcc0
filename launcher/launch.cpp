#include "launcher/launch.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>

#include "launcher/cores.h"
#include "launcher/event_wait.h"
#include "launcher/job.h"
#include "launcher/job_token.h"
#include "launcher/reserved_port.h"
#include "launcher/with_terminal.h"

namespace tessera::tools {
namespace {

/// Time in which a launcher on another node sees its ranks end.
constexpr std::chrono::seconds kOtherNodes{3};

/// The parts of the job that all its starts share.
struct Plan {
  std::vector<int> node_ranks;
  int node = 0;
  int threads = 1;
  std::vector<std::vector<int>> cores;

  int local_ranks() const { return node_ranks[node]; }
  int ranks() const { return std::accumulate(node_ranks.begin(), node_ranks.end(), 0); }
  int first_rank() const {
    return std::accumulate(node_ranks.begin(), node_ranks.begin() + node, 0);
  }
};

Plan make_plan(const LaunchOptions& options, Terminal& terminal) {
  const Cores cores = available_cores();
  Plan plan;
  if (options.place) {
    plan.node_ranks = options.place->ranks;
    plan.node = options.place->node;
  } else {
    plan.node_ranks = {options.ranks > 0 ? options.ranks : cores.usable};
  }
  const int ranks = plan.local_ranks();
  plan.threads = std::max(1, cores.usable / ranks);
  const int count = static_cast<int>(cores.ids.size());
  // If a control group grants less time than there are cores, other programs use those cores, too.
  const bool fits = ranks <= cores.usable && cores.usable == count;
  if (options.binding == Binding::kNone || (options.binding == Binding::kAuto && !fits))
    return plan;
  if (ranks > count) {
    say(terminal, fmt::format("not bound to cores: {} ranks, {} cores", ranks, count));
    return plan;
  }
  for (int rank = 0; rank < ranks; ++rank) {
    plan.cores.push_back(core_slice(cores.ids, rank, ranks));
  }
  return plan;
}

/// Starts the ranks, and starts them again if they fail and restarts are left.
class Launch {
 public:
  Launch(const LaunchOptions& options, Terminal& terminal, SignalPipe& signals)
      : options_(options),
        terminal_(terminal),
        signals_(signals),
        plan_(make_plan(options, terminal)),
        flights_(options.log_dir,
                 plan_.node == 0 ? "flight" : fmt::format("flight_node_{}", plan_.node)) {}

  int run() {
    guardian_ = std::make_unique<Guardian>(plan_.local_ranks(), flights_.path());
    if (!flights_.problem().empty())
      say(terminal_, fmt::format("ranks write no flight records: {}", flights_.problem()));
    for (int attempt = 0;; ++attempt) {
      const bool is_last = attempt >= options_.max_restarts;
      if (const auto status = start(attempt); status.second || is_last || status.first == 0)
        return status.first;
    }
  }

 private:
  /// Returns the exit status, and whether the job must not be started again.
  std::pair<int, bool> start(int attempt) {
    // Only rank 0 listens.
    std::optional<ReservedPort> port;
    if (plan_.node == 0) port.emplace(options_.place ? options_.place->port : options_.master_port);
    const RankAssignment assignment = assignment_of(attempt, port ? port->number() : 0);
    if (attempt > 0) {
      say(terminal_, fmt::format("restart {} of {}: starting all {} ranks again, port {}", attempt,
                                 options_.max_restarts, plan_.local_ranks(), assignment.port));
    }
    JobReport report(terminal_, flights_, attempt);
    Job job(options_, {assignment, plan_.cores},
            {terminal_, signals_, flights_, *guardian_, report});
    flights_.remove_records(job.ranks());
    const JobEnd end = job.run();
    const std::vector<FlightReport> flights = flights_.read_failed(job.ranks());
    const int status = report.on_end(end, flights);
    if (end.interrupted_by == SIGPIPE) return {128 + SIGPIPE, true};
    if (status != 0 && end.interrupted_by == 0 && attempt >= options_.max_restarts)
      let_the_cause_end_first(blamed_rank(flights), job.ranks());
    return {status, end.interrupted_by != 0 || !end.immortal.empty()};
  }

  RankAssignment assignment_of(int attempt, int port) const {
    RankAssignment assignment{.ranks = plan_.ranks(),
                              .port = port,
                              .attempt = attempt,
                              .threads = plan_.threads,
                              .first_rank = plan_.first_rank(),
                              .local_ranks = plan_.local_ranks(),
                              .flight_folder = flights_.path()};
    if (!options_.place) {
      assignment.job = random_job_token();
      assignment.secret = random_job_token();
      return assignment;
    }
    const NodePlace& place = *options_.place;
    assignment.master = place.master;
    assignment.port = place.port;
    // The nodes do not talk, but each of them knows this much.
    assignment.job = job_token(
        place.job.empty() ? fmt::format("{}:{}", place.master, place.port) : place.job, attempt);
    return assignment;
  }

  /// If the ranks blame one of another node, waits a while for the signal by which mpirun or srun
  /// ends this launcher once that node's has ended: the job's exit status is then that of the
  /// cause.
  void let_the_cause_end_first(int blamed, const std::vector<int>& here) {
    if (blamed < 0 || std::find(here.begin(), here.end(), blamed) != here.end()) return;
    const auto until = Clock::now() + options_.grace + kOtherNodes;
    while (Clock::now() < until) {
      const std::vector<int> signals = wait_for_events(signals_, terminal_, {}, until);
      if (std::ranges::any_of(signals, [](int signal) { return signal != SIGCHLD; })) return;
    }
  }

  const LaunchOptions& options_;
  Terminal& terminal_;
  SignalPipe& signals_;
  Plan plan_;
  std::unique_ptr<Guardian>
      guardian_;  // outlives the folder, and removes it if this process is killed
  FlightFolder flights_;
};

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
  return Launch(options, terminal, signals).run();
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
  return with_terminal([&](Terminal& terminal, SignalPipe& signals) {
    const Subreaper subreaper;
    return checked_launch(options, terminal, signals);
  });
}

}  // namespace tessera::tools
