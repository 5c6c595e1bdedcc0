#pragma once

namespace CLI {
class App;
}

namespace tessera::tools {

struct DispatchBenchOptions {
  int rounds = 21;   ///< turns of each operator, on DistTensors and on ordinary tensors
  int calls = 2000;  ///< of an operator in a turn
  bool json = false;
};

/// Measures the extra cost of operators on DistTensors over the same on ordinary tensors, on the
/// processor, in a world of one rank and with tensors so small that the computation costs little.
///
/// Both take turns. Prints a table, or one line of JSON, with microseconds per call: medians over
/// the rounds. Returns the exit status.
int bench_dispatch(const DispatchBenchOptions& options);

/// Adds the command `dispatch`.
void add_dispatch_bench(CLI::App& bench, int& exit_code);

}  // namespace tessera::tools
