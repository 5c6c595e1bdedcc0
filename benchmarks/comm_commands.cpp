#include <CLI/CLI.hpp>
#include <memory>

#include "benchmarks/comm_bench.h"
#include "benchmarks/command/bench_commands.h"
#include "command/exit_code.h"

namespace tessera::tools {
namespace {

constexpr const char* kWho = "tessera bench comm";

void add_measurement(CLI::App& command, CommBenchOptions& options) {
  command.option_defaults()->always_capture_default();
  command.add_option("--sizes", options.sizes, "bytes of the whole buffer, in MiB")->delimiter(',');
  command.add_option("--rounds", options.rounds, "turns of each operation");
}

}  // namespace

void add_comm_bench(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<CommBenchOptions>();
  auto* comm =
      bench.add_subcommand("comm", "collectives against c10d's own and against memcpy, over Gloo");
  add_measurement(*comm, *options);
  comm->add_option("--ranks", options->ranks, "processes");
  comm->add_flag("--json", options->json, "print one line of JSON");
  comm->callback([options, &exit_code] {
    exit_code = exit_code_of(kWho, [&] { return bench_comm(*options); });
  });

  auto worker_options = std::make_shared<CommBenchOptions>();
  auto* worker = bench.add_subcommand("comm-worker", "one rank of `comm`")->group("");
  add_measurement(*worker, *worker_options);
  worker->callback([worker_options, &exit_code] {
    exit_code = exit_code_of(kWho, [&] { return bench_comm_worker(*worker_options); });
  });
}

}  // namespace tessera::tools
