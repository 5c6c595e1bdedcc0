#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::tools {

struct RanksBenchOptions {
  std::string level = "p_g_os";  ///< none, os, os_g or p_g_os
  std::vector<int> ranks = {2, 16, 128, 1024};
  int layers = 48;
  int width = 128;  ///< of the square weight of each layer, which is a unit
  int rounds = 15;  ///< turns of each number of ranks
  int steps = 20;   ///< in a turn
  bool json = false;
};

/// Measures the cost of a training step for rank 0 of so many ranks, in fake worlds: the same model
/// with next to no computation, and all the library's work around it except the messages.
///
/// The worlds take turns. Prints a table, or one line of JSON, with milliseconds of processor time
/// per step: the median and the least of the rounds. Returns the exit status.
int bench_ranks(const RanksBenchOptions& options);

/// Adds the command `ranks`.
void add_ranks_bench(CLI::App& bench, int& exit_code);

}  // namespace tessera::tools
