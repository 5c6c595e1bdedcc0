#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::tools {

/// The options of `tessera bench scale`.
struct ScaleBenchOptions {
  std::vector<int64_t> tensors = {100, 1000, 10000};
  std::vector<int64_t> elements = {1'000'000, 10'000'000, 100'000'000};
  std::vector<int64_t> threads = {2, 4, 8, 16};
  std::vector<int64_t> ranks = {2, 64, 4096};
  int rounds = 3;  ///< of each measurement; the fastest counts
  std::filesystem::path directory = std::filesystem::temp_directory_path();  ///< for checkpoints
  bool json = false;
};

/// Measures what Tessera's own work costs by the number of tensors, of elements and of ranks, on
/// models that compute next to nothing:
///
/// - tensors: of 64 elements, 2 ranks that are threads, `kParameters`;
/// - elements: of 100 tensors, made deferred, as rank 0 of 1,024 in a fake world;
/// - threads: 1,000 tensors of 64 elements over ranks that are threads; the time of all of them;
/// - ranks: the same as rank 0 of a fake world.
///
/// Prints seconds, and the *exponent*: the slope of their logarithm over that of the number, from
/// the first to the last number whose time is at least 1 ms. An exponent of 1 is work that grows as
/// the number does. Also the bytes that a rank sends to agree with the others in a wrap, and those
/// of memory that the process has taken. Prints a table, or one line of JSON, to stdout and
/// progress to stderr. Returns the exit status.
int bench_scale(const ScaleBenchOptions& options);

/// Adds the subcommand `scale` to `bench`.
void add_scale_bench(CLI::App& bench, int& exit_code);

}  // namespace tessera::tools
