#pragma once

#include <cstdint>
#include <string>

namespace CLI {
class App;
}

namespace tessera::tools {

struct OptimBenchOptions {
  int64_t elements = 32'000'000;       ///< of the parameter that is stepped
  std::string dtype = "all";           ///< `fp32`, `bf16`, `master` or `all`
  std::string optimizer = "cpu_adam";  ///< `cpu_adam`, `fused_adamw` or `adamw`
  int threads = 0;                     ///< 0: as many as LibTorch takes
  int rounds = 11;                     ///< turns of triad and step
  bool json = false;
};

/// Measures the memory bandwidth of optimizer steps, against a triad that takes turns with them.
///
/// Prints a table, or one line of JSON, with bytes per second (those that the computation must read
/// and write once): medians and bests over the rounds. Returns the exit status.
int bench_optim(const OptimBenchOptions& options);

/// Adds the command `optim`.
void add_optim_bench(CLI::App& bench, int& exit_code);

}  // namespace tessera::tools
