#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::tools {

/// Where the threads of a rank may run.
enum class Binding {
  kAuto,   ///< `kCores` if there are at least as many cores as ranks, else `kNone`
  kNone,   ///< anywhere that this process may run
  kCores,  ///< each rank on its own, equal slice of the cores
};

/// The place of this machine in a job over several nodes. Each node's launcher gets the same, but
/// for `node`.
struct NodePlace {
  std::vector<int> ranks;  ///< of each node
  int node = 0;
  std::string master;  ///< host name or address of node 0
  int port = 0;        ///< where rank 0 listens
  std::string job;  ///< the text by which ranks know their job; empty: made of `master` and `port`
};

/// The ranks of a job on this machine.
struct LaunchOptions {
  int ranks = 0;                     ///< 0: one for each core that this process may use
  std::vector<std::string> command;  ///< the program and its arguments

  /// Variables that every rank gets; they override those of this process and of the launcher.
  std::vector<std::pair<std::string, std::string>> environment;

  int master_port = 0;  ///< 0: a free one
  Binding binding = Binding::kAuto;
  bool default_malloc = false;  ///< leave glibc's heap settings alone
  bool prefix = true;           ///< "[rank] " before each line
  bool quiet = false;           ///< show the output of rank 0 only
  std::string log_dir;          ///< not empty: keep rank_N.out and rank_N.err there
  int max_restarts = 0;
  std::optional<NodePlace> place;  ///< nothing: all ranks are on this machine

  std::chrono::milliseconds grace{5000};             ///< from SIGTERM to SIGKILL
  std::chrono::milliseconds interrupt_grace{30000};  ///< from a passed-on signal to SIGTERM

  /// Receives the lines that ranks write to stdout; empty: they are shown.
  std::function<void(int rank, std::string_view line)> on_stdout;
};

/// Runs the ranks, waits for them and returns the exit status of the job.
///
/// That is 0 if all ranks exit with 0, else that of the cause (128 + N if signal N killed it): a
/// rank that a signal killed, else one that the flight records of the others blame, else the rank
/// that failed first; 127 or 126 if the program can't be executed, 2 if there is no program or
/// `ranks` is negative, and 1 if the job can't be set up. Errors are written to stderr last.
/// SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the ranks meanwhile. All ranks,
/// with the processes that they started in their process groups, have ended when it returns. They
/// are killed if the calling thread ends earlier. One call at a time.
int launch(const LaunchOptions& options);

}  // namespace tessera::tools
