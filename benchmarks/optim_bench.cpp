#include "benchmarks/optim_bench.h"

#include <fmt/format.h>
#include <tessera/base/page_heap.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "benchmarks/median.h"
#include "benchmarks/optim_steps.h"
#include "command/exit_code.h"

namespace tessera::tools {
namespace {

using Json = nlohmann::ordered_json;
using torch::Tensor;

// Of a triad, as STREAM counts them: the bytes that it reads and writes, without the lines that a
// cache reads because they are about to be overwritten. The step overwrites data that it has read.
constexpr int64_t kTriadBytes = 3 * 4;
constexpr int64_t kTriadBytesWithAllocate = 4 * 4;

struct Triad {
  explicit Triad(int64_t elements)
      : a(torch::zeros({elements})), b(torch::ones({elements})), c(torch::ones({elements})) {}
  void run() { torch::add_out(a, b, c, 0.5); }  // a = b + 0.5 * c
  Tensor a, b, c;
};

// In GB/s.
template <class F>
double bandwidth(int64_t bytes, F&& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return static_cast<double>(bytes) / seconds.count() / 1e9;
}

double best_of(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

Json summary_of(const std::vector<double>& values) {
  return {{"median", median_of(values)}, {"best", best_of(values)}};
}

Json measure(const OptimBenchOptions& options, const std::string& dtype, Triad& triad) {
  const OptimStep step = make_optim_step(options.optimizer, dtype, options.elements);
  std::vector<double> triads, steps, ratios;
  for (int round = -1; round < options.rounds; ++round) {
    const double other = bandwidth(kTriadBytes * options.elements, [&] { triad.run(); });
    const double own = bandwidth(step.bytes_per_element * options.elements, step.run);
    if (round < 0) continue;  // makes the state, and touches memory for the first time
    triads.push_back(other);
    steps.push_back(own);
    ratios.push_back(own / other);
  }
  const double ratio = median_of(ratios);
  constexpr double kAllocate = double{kTriadBytesWithAllocate} / double{kTriadBytes};
  return {{"dtype", dtype},
          {"bytes_per_element", step.bytes_per_element},
          {"triad_gb_per_s", summary_of(triads)},
          {"step_gb_per_s", summary_of(steps)},
          {"ratio", ratio},
          {"ratio_of_bests", best_of(steps) / best_of(triads)},
          {"ratio_with_write_allocate", ratio / kAllocate}};
}

std::string optim_table(const Json& cases) {
  std::string text = fmt::format("{:<8}{:>8}{:>14}{:>8}{:>14}{:>8}{:>8}{:>10}{:>16}\n", "GB/s",
                                 "bytes", "triad median", "best", "step median", "best", "ratio",
                                 "of bests", "write-allocate");
  for (const Json& result : cases) {
    const Json &triad = result["triad_gb_per_s"], &step = result["step_gb_per_s"];
    text += fmt::format(
        "{:<8}{:>8}{:>14.1f}{:>8.1f}{:>14.1f}{:>8.1f}{:>8.2f}{:>10.2f}{:>16.2f}\n",
        result["dtype"].get<std::string>(), result["bytes_per_element"].get<int64_t>(),
        triad["median"].get<double>(), triad["best"].get<double>(), step["median"].get<double>(),
        step["best"].get<double>(), result["ratio"].get<double>(),
        result["ratio_of_bests"].get<double>(), result["ratio_with_write_allocate"].get<double>());
  }
  return text;
}

}  // namespace

int bench_optim(const OptimBenchOptions& options) {
  TORCH_CHECK_VALUE(options.rounds >= 1 && options.elements >= 1,
                    "[bench optim] --rounds and --elements must be at least 1; got ",
                    options.rounds, " and ", options.elements);
  TORCH_CHECK_VALUE(options.threads >= 0, "[bench optim] --threads must not be negative; got ",
                    options.threads);
  use_page_heap();
  if (options.threads > 0) at::set_num_threads(options.threads);
  Triad triad(options.elements);
  Json cases = Json::array();
  for (const char* dtype : {"fp32", "bf16", "master"})
    if (options.dtype == "all" || options.dtype == dtype)
      cases.push_back(measure(options, dtype, triad));
  const Json report = {{"bench", "optim"},
                       {"optimizer", options.optimizer},
                       {"elements", options.elements},
                       {"threads", at::get_num_threads()},
                       {"rounds", options.rounds},
                       {"cases", cases},
                       {"versions", {{"torch", TORCH_VERSION}}}};
  fmt::print("{}\n", options.json ? report.dump() : optim_table(cases));
  return 0;
}

void add_optim_bench(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<OptimBenchOptions>();
  auto* optim =
      bench.add_subcommand("optim", "how fast optimizer steps go through memory, against a triad");
  optim->option_defaults()->always_capture_default();
  optim->add_option("--elements", options->elements, "of the parameter that is stepped");
  optim
      ->add_option("--dtype", options->dtype, "of parameter and gradient; master: fp32 beside bf16")
      ->check(CLI::IsMember({"fp32", "bf16", "master", "all"}));
  optim->add_option("--optimizer", options->optimizer, "cpu_adam, or LibTorch's")
      ->check(CLI::IsMember({"cpu_adam", "fused_adamw", "adamw"}));
  optim->add_option("--threads", options->threads, "0: as many as LibTorch takes");
  optim->add_option("--rounds", options->rounds, "turns of triad and step");
  optim->add_flag("--json", options->json, "print one line of JSON");
  optim->callback([options, &exit_code] {
    exit_code = exit_code_of("tessera bench optim", [&] { return bench_optim(*options); });
  });
}

}  // namespace tessera::tools
