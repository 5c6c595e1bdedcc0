#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/linked_hosts.h"
#include "benchmarks/step_bench.h"

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

/// Returns the numbers that `tessera bench link --json` prints.
///
/// - `seconds`: median over the timed steps of all ranks and rounds.
/// - `compute_seconds`: median of the steps of processes that train alone, with the optimizer's
///   part divided by the number of ranks.
/// - `wire_nbytes`: bytes that the host that sends most sends per step, by its link's counters;
///   median of the rounds. `payload_nbytes`: the same without headers. `formula_nbytes`: the
///   payload that `plan_report()` computes: of one rank per host where the ranks of a host share
///   memory; otherwise of all ranks of a host, without what stays inside it. `payload_ratio`: the
///   ratio of the two.
/// - `transfer_seconds`: time in which each host sends as many bytes to the next one, and nothing
///   else happens.
/// - `link_seconds`: `wire_nbytes` at the links' bandwidth; without a limit, `transfer_seconds`.
/// - `roofline_seconds`: the longer of `compute_seconds` and `link_seconds`.
/// - `ratio_to_roofline`: median over the rounds of the step by the roofline of its round, and the
///   interval in which that median lies (`median_interval()`).
/// - `both_seconds`: the longer of computation and transfer while both are done at once by separate
///   processes: on cores that move the bytes, too, no step is shorter. `ratio_to_both`: the step by
///   it, as `ratio_to_roofline`.
/// - `others`: for each other system its `seconds`, `wire_nbytes` and `ratio`, its step by the
///   sharded one in the same round: above 1, the sharded one is faster.
nlohmann::ordered_json link_report(const LinkBenchOptions& options, const LinkResult& result);

/// Formats `link_report()` for human readers.
std::string link_table(const nlohmann::ordered_json& report);

/// Makes several hosts with slow links (`LinkedHosts`), and measures a training step of a sharded
/// job on them against its limit: the computation of a step, or the time that the links need for
/// its bytes, whichever is longer.
///
/// Each round has a turn of each: the job; a transfer of as many bytes; as many processes that
/// train alone; both at once, to see what moving the bytes costs the cores of this machine; and the
/// jobs of `options.against`. A turn begins when nothing moves on the links. Its first step is not
/// timed, so that each timed step begins with what the one before it has left to the background.
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
