#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/linked_hosts.h"
#include "benchmarks/step_bench.h"
#include "benchmarks/step_result.h"

namespace tessera::tools {

/// The options of `tessera bench link`. `link_report()` describes the numbers.
struct LinkBenchOptions {
  StepBenchOptions step;  ///< `ranks` is not used
  int hosts = 2;
  int ranks_per_host = 1;
  double mbit = 0;  ///< of each link and direction, in 10^6 bits per second; 0: no limit
  std::string congestion = LinkedHosts::kCongestion;  ///< of TCP, on the hosts
  std::vector<std::string> against;                   ///< of PyTorch: fsdp2, ddp
  std::string python = "python3";  ///< with PyTorch and Tessera's package, for `against`

  int ranks() const { return hosts * ranks_per_host; }
};

/// The numbers of a job over links, and of what it is compared with. Vectors are by round.
struct LinkResult {
  /// A job that trains over the links.
  struct Job {
    RoleResult role;
    // Per step, of the host that sends most.
    std::vector<double> wire_nbytes, payload_nbytes;
  };
  Job sharded;
  RoleResult local;                      ///< each process trains alone
  RoleResult beside;                     ///< the same, beside a transfer of the bytes of all steps
  std::vector<double> transfer_seconds;  ///< of as many bytes from each host, and nothing else
  std::vector<double> beside_seconds;    ///< of the transfer beside `beside`, per step
  std::map<std::string, Job> others;     ///< by name
  std::string transport;                 ///< of the sharded job: "gloo" or "arena+gloo"
};

/// Measures a training step of a sharded job on several hosts with slow links, which it makes
/// (`LinkedHosts`), against its limit: the computation of a step, or the time that the links need
/// for its bytes, whichever is longer.
///
/// Each round has a turn of each: the job; a transfer of as many bytes; as many processes, each of
/// which trains alone; both at once, which tells what moving the bytes costs the cores of this
/// machine; and the jobs of `options.against`. A turn begins when nothing moves on the
/// links. Its first step is not timed, so that each timed step begins with what the one before it
/// has left to the background.
///
/// Prints a table, or one line of JSON, to stdout and progress to stderr. Returns the exit status;
/// throws `c10::ValueError` for options that do not exist, and what `LinkedHosts` throws where no
/// such hosts can be made.
int bench_link(const LinkBenchOptions& options);

/// One process of a transfer, of rank RANK of the world in its environment: `transfer N` sends N
/// bytes to the next host and answers with the seconds that it took. See `serve_commands()`.
int bench_link_worker();

/// Adds the commands `link` and, hidden, `link-worker`.
void add_link_bench(CLI::App& bench, int& exit_code);

}  // namespace tessera::tools
