// Benchmarks of parts of the library, each beside what it is compared with, by google/benchmark.
//
//     micro_benchmarks --benchmark_filter=dispatch [--benchmark_repetitions=N]
//     tessera run -n 2 --no-prefix micro_benchmarks --benchmark_filter=comm
//
// The repetitions are rounds in which all that is compared takes turns. All ranks run the same
// benchmarks, and rank 0 prints.

#include <ATen/ops/full.h>
#include <benchmark/benchmark.h>
#include <tessera/comm/build_info.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "benchmarks/seconds.h"
#include "rounds.h"

namespace tessera::micro {
namespace {

// What benchmarks use is destroyed in the opposite order.
std::optional<World> made_world;
std::pair<std::string, Round> current;

struct Silent : benchmark::BenchmarkReporter {
  bool ReportContext(const Context& /*context*/) override { return true; }
  void ReportRuns(const std::vector<Run>& /*runs*/) override {}
};

double least(const std::vector<double>& values) { return *std::ranges::min_element(values); }
double most(const std::vector<double>& values) { return *std::ranges::max_element(values); }

int run(std::vector<std::string> arguments, const char* program) {
  std::ranges::reverse(arguments);  // CLI11 takes them from the back
  Options options;
  CLI::App app;
  app.set_help_flag();  // google/benchmark has one
  app.allow_extras();
  const auto add = [&](const char* name, auto& value) { app.add_option(name, value); };
  add("--elements", options.elements);
  add("--megabytes", options.megabytes);
  add("--directory", options.directory);
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  arguments = app.remaining();
  std::vector<char*> rest = {const_cast<char*>(program)};
  for (std::string& argument : arguments) rest.push_back(argument.data());
  int count = static_cast<int>(rest.size());
  rest.push_back(nullptr);
  benchmark::Initialize(&count, rest.data());
  if (benchmark::ReportUnrecognizedArguments(count, rest.data())) return 2;
  benchmark::AddCustomContext("tessera", describe(build_info()));
  add_ckpt(options);
  add_comm();
  add_dispatch();
  add_optim(options);
  add_ranks();
  const char* const rank = std::getenv("RANK");
  Silent silent;
  const bool prints = rank == nullptr || std::string(rank) == "0";
  const size_t count_run =
      prints ? benchmark::RunSpecifiedBenchmarks() : benchmark::RunSpecifiedBenchmarks(&silent);
  current = {};
  made_world.reset();
  return count_run > 0 ? 0 : 1;
}

}  // namespace

const World& world() {
  if (!made_world) made_world.emplace(init());
  return *made_world;
}

double slowest_seconds_of(ProcessGroup& ranks, const std::function<void()>& run) {
  ranks.barrier({"begin"});
  const auto longest = at::full({1}, seconds_of(run), at::kDouble);
  ranks.all_reduce(longest, ReduceOp::kMax, {"seconds"})->wait();
  return longest.item<double>();
}

void add_rounds(const std::string& name, std::function<Round()> make) {
  const auto rounds = [name, make = std::move(make)](benchmark::State& state) {
    if (current.first != name) {
      current = {};
      current = {name, make()};
      current.second();
    }
    for ([[maybe_unused]] auto turn : state)
      for (const auto& [key, value] : current.second()) state.counters[key] = value;
  };
  benchmark::RegisterBenchmark(name.c_str(), rounds)
      ->Iterations(1)
      ->Unit(benchmark::kMillisecond)
      ->ComputeStatistics("least", least)
      ->ComputeStatistics("most", most);
}

}  // namespace tessera::micro

int main(int argc, char** argv) {
  std::vector<std::string> arguments = {"--benchmark_repetitions=11",
                                        "--benchmark_report_aggregates_only=true"};
  arguments.insert(arguments.end(), argv + 1, argv + argc);
  return tessera::micro::run(std::move(arguments), argv[0]);
}
