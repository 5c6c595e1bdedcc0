#include <CLI/CLI.hpp>
#include <memory>

#include "benchmarks/command/bench_commands.h"
#include "benchmarks/link_bench.h"
#include "command/exit_code.h"

namespace tessera::tools {

void add_link_bench(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<LinkBenchOptions>();
  options->step = {.transport = "auto", .rounds = 5, .steps = 3};
  auto* link = bench.add_subcommand(
      "link", "a training step over slow links between hosts, against the links' and cores' limit");
  add_workload(*link, options->step);
  link->add_option("--hosts", options->hosts, "network namespaces, made for this (needs root)");
  link->add_option("--ranks-per-host", options->ranks_per_host, "processes on each host");
  link->add_option("--mbit", options->mbit,
                   "bandwidth of each host's link, in 10^6 bits per second; 0: no limit");
  link->add_option("--congestion", options->congestion,
                   "the hosts' congestion control of TCP, as the kernel names it");
  link->add_option("--rounds", options->step.rounds, "turns of each");
  link->add_option("--steps", options->step.steps, "timed steps in a turn");
  link->add_option("--against", options->against,
                   "jobs of PyTorch in turns with it: fsdp2, ddp, with a comma between")
      ->delimiter(',');
  link->add_option("--python", options->python,
                   "the Python for them, with PyTorch and Tessera's package");
  link->add_flag("--json", options->step.json, "print one line of JSON");
  link->callback([options, &exit_code] {
    exit_code = exit_code_of("tessera bench link", [&] { return bench_link(*options); });
  });

  auto* worker = bench.add_subcommand("link-worker", "one process of a transfer")->group("");
  worker->callback([&exit_code] {
    exit_code = exit_code_of("tessera bench link: a transfer's process", bench_link_worker);
  });
}

}  // namespace tessera::tools
