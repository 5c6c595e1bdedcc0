#include "benchmarks/step_bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/planner/plan_report.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "benchmarks/core_noise.h"
#include "benchmarks/loop.h"
#include "benchmarks/step_report.h"
#include "command/level_names.h"
#include "launcher/cores.h"
#include "launcher/environment.h"
#include "launcher/reserved_port.h"

namespace tessera::tools {
namespace {

constexpr int kMemorySteps = 2;
constexpr std::chrono::milliseconds kNoiseOfTurn(50), kNoiseOfRound(500);
constexpr std::chrono::seconds kLongestWaitForQuiet(60);

void check_options(const StepBenchOptions& options) {
  TORCH_CHECK_VALUE(options.quiet == 0 || options.quiet > 1,
                    "[bench step] --quiet must be 0, or above 1, which is no noise; got ",
                    options.quiet);
  TORCH_CHECK_VALUE(
      options.optimizer == "adamw" || !loop_switches(options.loop).bf16,
      "[bench step] --optimizer muon has no loop with bf16: the local reference keeps "
      "no master weights for it");
  const bool is_plain = loop_switches(options.loop).is_plain();
  if (options.dialect == "native") return;
  TORCH_CHECK_VALUE(options.level == "os" || options.level == "os_g",
                    "[bench step] --dialect fairscale has the levels os and os_g; got '",
                    options.level, "'");
  TORCH_CHECK_VALUE(options.optimizer == "adamw",
                    "[bench step] --optimizer muon goes with --dialect native; got '",
                    options.dialect, "'");
  TORCH_CHECK_VALUE(is_plain, "[bench step] loops go with --dialect native; got '", options.dialect,
                    "'");
  TORCH_CHECK_VALUE(
      options.gather_dtype.empty() && options.reduce_dtype.empty(),
      "[bench step] --gather-dtype and --reduce-dtype go with --dialect native; got '",
      options.dialect, "'");
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

// The processes of one role.
struct StepTeam : Team {
  StepTeam(StepRole role, const StepBenchOptions& options, ReservedPort reserved = ReservedPort(0))
      : Team(to_string(role), start_workers(options, role, reserved.number())),
        of(role),
        port(std::move(reserved)) {}

  const StepRole of;
  const ReservedPort port;
};

void progress(const std::string& text) { show_progress("step", text); }

std::string describe_turn(const std::vector<std::unique_ptr<StepTeam>>& teams) {
  std::vector<std::string> medians;
  for (const auto& team : teams)
    medians.push_back(fmt::format("{} {:.4f} s", team->name(), team->result.turn_medians().back()));
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
  constexpr const char* kNames[] = {"sharded", "local", "in_step", "native", "threads"};
  return kNames[static_cast<int>(role)];
}

std::vector<std::string> step_worker_command(const StepBenchOptions& options, StepRole role,
                                             int rank) {
  std::vector<std::string> arguments = {this_program(), "bench", "step-worker"};
  const auto add = [&](const std::string& name, const auto& value) {
    arguments.push_back(fmt::format("{}={}", name, value));
  };
  StepBenchOptions workload = options;
  if (role == StepRole::kNative) workload.dialect = "native";
  CLI::App parser;
  add_workload(parser, workload);  // which knows the values
  for (const CLI::Option* option : parser.get_options()) {
    if (const auto value = option->get_default_str(); !value.empty())
      add(option->get_name(), value);
  }
  const auto cores = available_cores().ids;
  add("--loop", options.loop);
  add("--ranks", options.ranks);
  add("--rank", rank);
  // Threads of one process are not bound to cores.
  add("--core", role == StepRole::kThreads ? -1 : cores[rank % cores.size()]);
  add("--role", static_cast<int>(role == StepRole::kNative ? StepRole::kSharded : role));
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
  std::vector<std::unique_ptr<StepTeam>> teams;
  const auto add = [&](StepRole role, bool is_chosen = true) {
    if (is_chosen) teams.push_back(std::make_unique<StepTeam>(role, options));
  };
  add(StepRole::kSharded);
  add(StepRole::kLocal);
  add(StepRole::kInStep, options.in_step);
  add(StepRole::kNative, options.dialect != "native");
  add(StepRole::kThreads, options.threads);

  progress(fmt::format("{} at {}, {} ranks, loop: {}: {} warm-up steps", options.size,
                       options.level, options.ranks, options.loop, kWarmupSteps));
  for (const auto& team : teams) team->result.prepared = team->ask("prepare", kWarmupSteps);
  StepResult result;
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
      team->result.turns.push_back(team->ask("train", options.steps));
    }
    progress(fmt::format("round {} of {}: {}", round + 1, options.rounds, describe_turn(teams)));
    std::ranges::rotate(teams, teams.begin() + 1);
  }
  for (const auto& team : teams) {
    if (options.memory) team->result.memory = team->ask("memory", kMemorySteps);
    result.roles[team->of] = std::move(team->result);
  }
  return result;
}

int bench_step(const StepBenchOptions& options) {
  const auto report = step_report(options, measure_steps(options));
  fmt::print("{}\n", options.json ? report.dump() : step_table(report));
  return 0;
}

}  // namespace tessera::tools
