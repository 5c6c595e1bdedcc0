#include "benchmarks/step_bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/planner/plan_report.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "benchmarks/core_noise.h"
#include "benchmarks/loop.h"
#include "benchmarks/step_report.h"
#include "benchmarks/worker_process.h"
#include "benchmarks/workload.h"
#include "command/level_names.h"
#include "launcher/cores.h"
#include "launcher/environment.h"
#include "launcher/reserved_port.h"

namespace tessera::tools {
namespace {

using nlohmann::json;

constexpr int kWarmupSteps = 3;
constexpr int kMemorySteps = 2;
constexpr std::chrono::seconds kLongestTurn(900);
constexpr std::chrono::milliseconds kNoiseOfTurn(50), kNoiseOfRound(500);
constexpr std::chrono::seconds kLongestWaitForQuiet(60);

void check_options(const StepBenchOptions& options) {
  const auto& sizes = workload_names();
  TORCH_CHECK_VALUE(
      std::ranges::find(sizes, options.size) != sizes.end(),
      "[bench step] --size must be a workload; expected tiny, small, medium or mlp, got '",
      options.size, "'");
  TORCH_CHECK_VALUE(kLevels.contains(options.level), "[bench step] --level must be a level; ",
                    "expected none, os, os_g or p_g_os, got '", options.level, "'");
  TORCH_CHECK_VALUE(
      options.transport == "gloo" || options.transport == "arena" || options.transport == "auto",
      "[bench step] --transport must be gloo, arena or auto, got '", options.transport, "'");
  const auto at_least = [](const char* name, int64_t least, int64_t value) {
    TORCH_CHECK_VALUE(value >= least, "[bench step] ", name, " must be at least ", least, ", got ",
                      value);
  };
  TORCH_CHECK_VALUE(options.dialect == "native" || options.dialect == "fairscale",
                    "[bench step] --dialect must be native or fairscale; got '", options.dialect,
                    "'");
  TORCH_CHECK_VALUE(options.dialect == "native" || options.level == "os" || options.level == "os_g",
                    "[bench step] --dialect fairscale has the levels os and os_g; got '",
                    options.level, "'");
  TORCH_CHECK_VALUE(options.quiet == 0 || options.quiet > 1,
                    "[bench step] --quiet must be 0, or above 1, which is no noise; got ",
                    options.quiet);
  TORCH_CHECK_VALUE(loop_switches(options.loop).is_plain() || options.dialect == "native",
                    "[bench step] loops go with --dialect native; got '", options.dialect, "'");
  TORCH_CHECK_VALUE(
      options.dialect == "native" || (options.gather_dtype.empty() && options.reduce_dtype.empty()),
      "[bench step] --gather-dtype and --reduce-dtype go with --dialect native; got '",
      options.dialect, "'");
  at_least("--ranks", 1, options.ranks);
  at_least("--rounds", 1, options.rounds);
  at_least("--steps", 1, options.steps);
  at_least("--unit-bytes", -1, options.unit_bytes);
  at_least("--resident-bytes", -1, options.resident_bytes);
  at_least("--prefetch", 0, options.prefetch);
}

// All kinds get the launcher's environment, and so the same heap settings.
WorkerProcesses start_workers(const StepBenchOptions& options, StepRole role, int port) {
  WorkerProcesses workers;
  const bool is_one = role == StepRole::kThreads;
  const int ranks = is_one ? 1 : options.ranks, threads = is_one ? options.ranks : 1;
  const LaunchOptions launch = {.environment = {{"OMP_NUM_THREADS", std::to_string(threads)}}};
  for (int rank = 0; rank < ranks; ++rank) {
    const RankAssignment assignment = {.rank = rank, .ranks = ranks, .port = port};
    workers.push_back(std::make_unique<WorkerProcess>(
        fmt::format("{} process {}", to_string(role), rank),
        step_worker_command(options, role, rank), rank_environment(launch, assignment)));
  }
  return workers;
}

void progress(const std::string& text) { fmt::print(stderr, "bench step: {}\n", text); }

// The processes of one role, and their answers.
struct Team {
  StepRole role;
  RoleResult& result;
  ReservedPort port{0};
  WorkerProcesses workers;

  Team(StepRole team_role, RoleResult& team_result, const StepBenchOptions& options)
      : role(team_role),
        result(team_result),
        workers(start_workers(options, role, port.number())) {}

  void prepare() {
    result.prepared = ask(workers, fmt::format("prepare {}", kWarmupSteps), kLongestTurn);
  }

  void train(int steps) {
    result.turns.push_back(ask(workers, fmt::format("train {}", steps), kLongestTurn));
  }

  void measure_memory() {
    result.memory = ask(workers, fmt::format("memory {}", kMemorySteps), kLongestTurn);
  }
};

std::string describe_turn(const std::vector<std::unique_ptr<Team>>& teams, int round) {
  std::vector<std::string> medians;
  for (const auto& team : teams) {
    medians.push_back(
        fmt::format("{} {:.4f} s", to_string(team->role), team->result.turn_median(round)));
  }
  return fmt::format("{}", fmt::join(medians, ", "));
}

// Noise comes and goes within seconds to minutes.
void wait_for_quiet(CoreNoise& noise, double quiet) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    const double now = noise.sample(kNoiseOfRound);
    if (now <= quiet) return;
    if (std::chrono::steady_clock::now() - start > kLongestWaitForQuiet) {
      progress(fmt::format("cores take {:.2f} times as long as at best after {} s: goes on", now,
                           kLongestWaitForQuiet.count()));
      return;
    }
  }
}

}  // namespace

const char* to_string(StepRole role) {
  switch (role) {
    case StepRole::kSharded:
      return "sharded";
    case StepRole::kLocal:
      return "local";
    case StepRole::kInStep:
      return "in step";
    case StepRole::kNative:
      return "native";
    case StepRole::kThreads:
      return "threads";
  }
  return "?";
}

std::vector<std::string> step_worker_command(const StepBenchOptions& options, StepRole role,
                                             int rank) {
  const auto cores = available_cores().ids;
  std::vector<std::string> arguments = {this_program(),
                                        "bench",
                                        "step-worker",
                                        "--size",
                                        options.size,
                                        "--level",
                                        options.level,
                                        "--transport",
                                        options.transport,
                                        "--dialect",
                                        role == StepRole::kNative ? "native" : options.dialect,
                                        "--loop",
                                        options.loop};
  const auto number = [&](const char* name, int64_t value) {
    arguments.push_back(fmt::format("{}={}", name, value));
  };
  if (!options.gather_dtype.empty())
    arguments.insert(arguments.end(), {"--gather-dtype", options.gather_dtype});
  if (!options.reduce_dtype.empty())
    arguments.insert(arguments.end(), {"--reduce-dtype", options.reduce_dtype});
  number("--unit-bytes", options.unit_bytes);
  number("--resident-bytes", options.resident_bytes);
  number("--prefetch", options.prefetch);
  number("--ranks", options.ranks);
  number("--rank", rank);
  // Threads of one process are not bound to cores.
  number("--core", role == StepRole::kThreads ? -1 : cores[rank % cores.size()]);
  number("--role", static_cast<int>(role == StepRole::kNative ? StepRole::kSharded : role));
  return arguments;
}

ShardPlan step_bench_plan(const StepBenchOptions& options) {
  check_options(options);
  ShardPlan plan;
  plan.level = kLevels.at(options.level);
  if (options.unit_bytes >= 0) plan.unit_bytes = options.unit_bytes;
  plan.resident_bytes = options.resident_bytes;
  plan.prefetch = options.prefetch;
  if (!options.gather_dtype.empty())
    plan.precision.gather_dtype = parse_dtype(options.gather_dtype);
  if (!options.reduce_dtype.empty())
    plan.precision.reduce_dtype = parse_dtype(options.reduce_dtype);
  if (loop_switches(options.loop).bf16) plan.precision.master_dtype = torch::kFloat;
  return plan;
}

StepResult measure_steps(const StepBenchOptions& options) {
  check_options(options);
  StepResult result = {.warmup_steps = kWarmupSteps};
  std::vector<std::unique_ptr<Team>> teams;
  const auto add = [&](StepRole role, RoleResult& of_role) {
    teams.push_back(std::make_unique<Team>(role, of_role, options));
  };
  add(StepRole::kSharded, result.sharded);
  add(StepRole::kLocal, result.local);
  if (options.in_step) add(StepRole::kInStep, result.in_step.emplace());
  if (options.dialect != "native") add(StepRole::kNative, result.native.emplace());
  if (options.threads) add(StepRole::kThreads, result.threads.emplace());

  progress(fmt::format("{} at {}, {} ranks, loop: {}: {} warm-up steps", options.size,
                       options.level, options.ranks, options.loop, kWarmupSteps));
  for (const auto& team : teams) team->prepare();
  auto cores = available_cores().ids;
  cores.resize(std::min(cores.size(), static_cast<size_t>(options.ranks)));
  CoreNoise noise(cores);
  noise.sample(kNoiseOfRound);  // to know the best time
  for (int round = 0; round < options.rounds; ++round) {
    if (options.quiet > 0) wait_for_quiet(noise, options.quiet);
    // Each team takes each position equally often, and follows itself equally often.
    for (const auto& team : teams) {
      // Background work that the last team left must not disturb this one.
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      result.core_noise.push_back(noise.sample(kNoiseOfTurn));
      team->train(options.steps);
    }
    progress(
        fmt::format("round {} of {}: {}", round + 1, options.rounds, describe_turn(teams, round)));
    std::ranges::rotate(teams, teams.begin() + 1);
  }
  if (options.memory)
    for (const auto& team : teams) team->measure_memory();
  return result;
}

int bench_step(const StepBenchOptions& options) {
  const auto report = step_report(options, measure_steps(options));
  fmt::print("{}\n", options.json ? report.dump() : step_table(report));
  return 0;
}

}  // namespace tessera::tools
