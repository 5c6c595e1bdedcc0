#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "benchmarks/loop_bench.h"
#include "benchmarks/step_bench.h"
#include "command/exit_code.h"

namespace tessera::tools {
namespace {

void add_turns(CLI::App& command, StepBenchOptions& options) {
  command.add_option("--ranks", options.ranks, "processes of each kind");
  command.add_option("--rounds", options.rounds, "turns of each kind");
  command.add_option("--steps", options.steps, "timed steps in a turn");
  command.add_option(
      "--quiet", options.quiet,
      "begin a round when the cores, by themselves, take at most so many times as long as at "
      "best, or after a minute; 0: at once");
  command.add_flag("--json", options.json, "print one line of JSON");
}

}  // namespace

void add_workload(CLI::App& command, StepBenchOptions& options) {
  command.option_defaults()->always_capture_default();
  command.add_option("--size", options.size, "tiny (to try this out), small, medium or mlp");
  command.add_option("--level", options.level, "none, os, os_g or p_g_os");
  command.add_option("--dialect", options.dialect,
                     "train by the library's own names (native) or FairScale's (fairscale)");
  command.add_option("--transport", options.transport, "gloo, arena or auto");
  command.add_option("--unit-bytes", options.unit_bytes,
                     "bytes of a unit; -1: as suits the transport");
  command.add_option("--resident-bytes", options.resident_bytes,
                     "unsharded bytes that may stay between two uses (p_g_os)");
  command.add_option("--prefetch", options.prefetch, "units gathered ahead of use (p_g_os)");
  command.add_option("--gather-dtype", options.gather_dtype,
                     "parameters are sent in this dtype, such as bfloat16 or int8");
  command.add_option("--reduce-dtype", options.reduce_dtype, "gradients are sent in this dtype");
}

void add_step_bench(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<StepBenchOptions>();
  auto* step = bench.add_subcommand(
      "step", "a training step of a sharded job against the same without any communication");
  add_workload(*step, *options);
  add_turns(*step, *options);
  step->add_flag("--in-step", options->in_step,
                 "also measure local processes that wait for each other once a step");
  step->add_flag(
      "--threads", options->threads,
      "also measure one process that trains on the batches of all ranks, with as many threads");
  step->callback([options, &exit_code] {
    exit_code = exit_code_of("tessera bench step", [&] { return bench_step(*options); });
  });

  auto loop_options = std::make_shared<LoopBenchOptions>();
  auto* loop = bench.add_subcommand(
      "loop", "steps of loops as users write them, with clipping, a schedule and so on");
  add_workload(*loop, loop_options->step);
  add_turns(*loop, loop_options->step);
  loop->add_option(
      "--loop", loop_options->loops,
      "switches with commas between them: clip, schedule, accumulate, evaluate, bf16, "
      "checkpoint, dropout; or all, or none. Several such loops are measured one after "
      "another; without this option none, each switch alone, and all");
  loop->callback([loop_options, &exit_code] {
    exit_code = exit_code_of("tessera bench loop", [&] { return bench_loop(*loop_options); });
  });

  auto worker_options = std::make_shared<StepWorkerOptions>();
  auto* worker = bench.add_subcommand("step-worker", "one process of `step`")->group("");
  add_workload(*worker, worker_options->bench);
  worker->add_option("--loop", worker_options->bench.loop);
  worker->add_option("--ranks", worker_options->bench.ranks);
  worker->add_option("--rank", worker_options->rank);
  worker->add_option("--core", worker_options->core);
  worker->add_option("--role", worker_options->role);
  worker->callback([worker_options, &exit_code] {
    const auto who = fmt::format("tessera bench step: {} process {}",
                                 to_string(worker_options->role), worker_options->rank);
    exit_code = exit_code_of(who, [&] { return bench_step_worker(*worker_options); });
  });
}

}  // namespace tessera::tools
