#pragma once

#include <tessera/engine/shard_plan.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "benchmarks/team.h"

namespace CLI {
class App;
}

namespace tessera::tools {

/// Steps before those that count.
constexpr int kWarmupSteps = 3;

/// The options of `tessera bench step`. `step_report()` describes the numbers.
struct StepBenchOptions {
  std::string size = "small";       ///< see `make_bench_model()`
  std::string level = "p_g_os";     ///< none, os, os_g or p_g_os
  std::string dialect = "native";   ///< native, or fairscale at os and os_g
  std::string transport = "arena";  ///< how the ranks of the sharded job communicate
  std::string optimizer = "adamw";  ///< adamw; or muon, for the matrices of hidden layers
  int ranks = 2;
  int rounds = 5;        ///< turns of each, the sharded job and the local reference
  int steps = 10;        ///< timed steps in a turn
  bool memory = true;    ///< also measure memory, in steps of their own
  bool in_step = false;  ///< also measure `StepRole::kInStep`
  bool threads = false;  ///< also measure `StepRole::kThreads`
  double quiet = 0;      ///< noise of the cores at which a round may begin; 0: any
  bool json = false;

  std::string loop = "none";  ///< see `loop_switches()`; native only

  // As in `ShardPlan`.
  int64_t unit_bytes = -1;  ///< the library's choice
  int64_t resident_bytes = ShardPlan{}.resident_bytes;
  int prefetch = ShardPlan{}.prefetch;
  std::string gather_dtype, reduce_dtype;  ///< as `parse_dtype()` reads them; empty: none
};

/// Measures a training step of a sharded job against the *local reference*: as many processes, each
/// of which trains alone, with the same fused optimizer and heap settings, and sends nothing.
///
/// The two take turns within one call, so that a machine that gets slower or faster meanwhile does
/// so for both. Prints a table, or one line of JSON, to stdout and progress to stderr. Returns the
/// exit status; throws `c10::ValueError` for options that do not exist.
int bench_step(const StepBenchOptions& options);

/// Measures the steps of loops as users write them: those of a sharded job against local processes,
/// against local processes that wait for each other once a step, and against one process with as
/// many threads that trains on the batches of all ranks. `loops`: see `loop_switches()`; empty:
/// none, each switch, and all. Prints and returns as `bench_step()` does.
///
/// The number of a round is that of all its steps together, because the work of every tenth step
/// counts, too; the ratios are medians over the rounds, with an interval (`median_interval()`).
int bench_loop(const StepBenchOptions& options, std::vector<std::string> loops);

/// The roles of a measurement's processes.
enum class StepRole {
  kSharded,  ///< train together
  kLocal,    ///< each trains alone
  kInStep,   ///< as `kLocal`, but after each backward they wait for each other
  kNative,   ///< as `kSharded`, by `fully_shard` in place of the dialect that is measured
  kThreads,  ///< one process with as many threads as there are ranks trains alone on the batches of
             ///< all of them
};

/// Returns the role's name in reports: "in_step", say.
const char* to_string(StepRole role);

struct StepResult {
  std::map<StepRole, RoleResult> roles;  ///< those that were measured
  std::vector<double> core_noise;        ///< before each turn: as many in each round
};

/// Lets the processes of each kind that `options` select take turns. Throws `c10::ValueError` for
/// options that do not exist.
StepResult measure_steps(const StepBenchOptions& options);

/// One process of such a measurement.
struct StepWorkerOptions {
  StepBenchOptions bench;
  StepRole role = StepRole::kLocal;
  int rank = 0;
  int core = -1;  ///< the core to stay on; -1: any
};

/// Returns the command that starts such a process.
std::vector<std::string> step_worker_command(const StepBenchOptions& options, StepRole role,
                                             int rank);

/// Trains as commanded by lines on stdin (`prepare N`, `train N`, `memory N`). Answers them as
/// `serve_commands()` does.
int bench_step_worker(const StepWorkerOptions& options);

/// Returns the plan of the sharded job. Throws `c10::ValueError` for options that exclude each
/// other.
ShardPlan step_bench_plan(const StepBenchOptions& options);

/// Adds the options of the workload, the job and its units.
void add_workload(CLI::App& command, StepBenchOptions& options);

/// Add the commands `step` and `loop`, and the hidden `step-worker`.
void add_step_bench(CLI::App& bench, int& exit_code);
void add_loop_bench(CLI::App& bench, int& exit_code);
void add_step_worker(CLI::App& bench, int& exit_code);

}  // namespace tessera::tools
