#include "launcher/launch_hosts.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <numeric>
#include <random>

#include "launcher/host_job.h"
#include "launcher/job_token.h"
#include "launcher/with_terminal.h"

namespace tessera::tools {
namespace {

/// Below the ports that systems give to programs that ask for any.
constexpr int kFirstPort = 20000;
constexpr int kPorts = 10000;

int random_port() {
  std::random_device device;
  return std::uniform_int_distribution<int>(kFirstPort, kFirstPort + kPorts - 1)(device);
}

int ranks_of(const std::vector<Host>& hosts) {
  return std::accumulate(hosts.begin(), hosts.end(), 0,
                         [](int sum, const Host& host) { return sum + host.ranks; });
}

std::string names_of(const std::vector<Host>& hosts) {
  std::string names;
  for (const Host& host : hosts) names += (names.empty() ? "" : ", ") + host.name;
  return names;
}

/// Starts the job on all hosts, and starts it again if it fails and restarts are left.
class HostsLaunch {
 public:
  HostsLaunch(const HostsOptions& options, Terminal& terminal, SignalPipe& signals)
      : options_(options),
        terminal_(terminal),
        signals_(signals),
        flights_(options.launch.log_dir),
        hosts_(options.hosts) {}

  int run() {
    for (int attempt = 0;; ++attempt) {
      const HostsStart start = start_of(attempt);
      if (attempt > 0) {
        say(terminal_, fmt::format("restart {} of {}: starting {} ranks again on {}, port {}",
                                   attempt, options_.launch.max_restarts, ranks_of(hosts_),
                                   names_of(hosts_), start.port));
      }
      TerminalReport report(terminal_, flights_, attempt);
      const HostJobEnd end = HostJob(options_, start, terminal_, signals_, report).run();
      if (!end.error.empty()) {
        say(terminal_, end.error);
        return end.error_status;
      }
      const int status = report.on_end(end.job, end.flight);
      if (end.job.interrupted_by == SIGPIPE) return 128 + SIGPIPE;
      const bool restarts = status != 0 && end.job.interrupted_by == 0 &&
                            end.job.immortal.empty() && attempt < options_.launch.max_restarts;
      if (!restarts || !leave_out(end.job.lost)) return status;
    }
  }

 private:
  HostsStart start_of(int attempt) const {
    // The first host may be another than at first.
    const bool is_first = hosts_.front().name == options_.hosts.front().name;
    return {.hosts = hosts_,
            .master =
                is_first && !options_.master.empty() ? options_.master : address_of(hosts_.front()),
            .port = options_.launch.master_port > 0 ? options_.launch.master_port : random_port(),
            .job = random_job_token(),
            .attempt = attempt};
  }

  /// Returns false if the job can't go on without the lost hosts.
  bool leave_out(const std::vector<LostHost>& lost) {
    // A launcher that never started would not start the next time, but a host that does not answer
    // is lost.
    constexpr int kSshFailed = 255;
    for (const LostHost& host : lost) {
      if (host.started || host.status == kSshFailed) continue;
      return false;
    }
    if (lost.empty() || options_.min_hosts == 0) return true;
    std::erase_if(hosts_, [&](const Host& host) {
      return std::any_of(lost.begin(), lost.end(),
                         [&](const LostHost& l) { return l.name == host.name; });
    });
    if (static_cast<int>(hosts_.size()) >= options_.min_hosts) return true;
    say(terminal_,
        fmt::format("{} hosts are left; --min-hosts is {}", hosts_.size(), options_.min_hosts));
    return false;
  }

  const HostsOptions& options_;
  Terminal& terminal_;
  SignalPipe& signals_;
  FlightFolder flights_;
  std::vector<Host> hosts_;
};

int checked_hosts_launch(const HostsOptions& options, Terminal& terminal, SignalPipe& signals) try {
  if (!options.launch.log_dir.empty()) std::filesystem::create_directories(options.launch.log_dir);
  return HostsLaunch(options, terminal, signals).run();
} catch (const ExecError& error) {
  say(terminal, error.what());
  return error.error == ENOENT ? 127 : 126;
} catch (const std::exception& error) {
  say(terminal, error.what());
  return 1;
}

}  // namespace

std::vector<std::string> default_ssh() {
  return {"ssh",
          "-o",
          "BatchMode=yes",
          "-o",
          "ConnectTimeout=20",
          "-o",
          "ServerAliveInterval=5",
          "-o",
          "ServerAliveCountMax=3"};
}

int launch_hosts(const HostsOptions& options) {
  return with_terminal([&](Terminal& terminal, SignalPipe& signals) {
    return checked_hosts_launch(options, terminal, signals);
  });
}

}  // namespace tessera::tools
