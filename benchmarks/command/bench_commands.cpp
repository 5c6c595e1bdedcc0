#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <limits>
#include <memory>

#include "benchmarks/link_bench.h"
#include "benchmarks/scale_bench.h"
#include "benchmarks/step_bench.h"
#include "command/exit_code.h"
#include "command/level_names.h"

namespace tessera::tools {
namespace {

const CLI::Range kCount(1, 1 << 30);

void add_turns(CLI::App& command, StepBenchOptions& options) {
  command.add_option("--ranks", options.ranks, "processes of each kind")->check(kCount);
  command.add_option("--rounds", options.rounds, "turns of each kind")->check(kCount);
  command.add_option("--steps", options.steps, "timed steps in a turn")->check(kCount);
  command.add_option(
      "--quiet", options.quiet,
      "begin a round when the cores, by themselves, take at most so many times as long as at "
      "best, or after a minute; 0: at once");
  command.add_flag("--json", options.json, "print one line of JSON");
}

}  // namespace

void add_workload(CLI::App& command, StepBenchOptions& options) {
  const auto none_or_more = CLI::Range(int64_t{-1}, std::numeric_limits<int64_t>::max());
  command.option_defaults()->always_capture_default();
  command.add_option("--size", options.size, "the model; tiny to try this out")
      ->check(CLI::IsMember({"tiny", "small", "medium", "mlp"}));
  command.add_option("--level", options.level, "of sharding")->check(CLI::IsMember(kLevels));
  command
      .add_option("--dialect", options.dialect,
                  "train by the library's own names (native) or FairScale's")
      ->check(CLI::IsMember({"native", "fairscale"}));
  command.add_option("--transport", options.transport, "how ranks send")
      ->check(CLI::IsMember({"gloo", "arena", "auto"}));
  command
      .add_option("--optimizer", options.optimizer,
                  "adamw; or muon, which steps whole matrices, with adamw for the other parameters")
      ->check(CLI::IsMember({"adamw", "muon"}));
  command
      .add_option("--unit-bytes", options.unit_bytes, "bytes of a unit; -1: as suits the transport")
      ->check(none_or_more);
  command
      .add_option("--resident-bytes", options.resident_bytes,
                  "unsharded bytes that may stay between two uses (p_g_os)")
      ->check(none_or_more);
  command.add_option("--prefetch", options.prefetch, "units gathered ahead of use (p_g_os)")
      ->check(CLI::Range(0, 1 << 30));
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
}

void add_loop_bench(CLI::App& bench, int& exit_code) {
  auto loop_options = std::make_shared<StepBenchOptions>(StepBenchOptions{
      .rounds = 10, .steps = 10, .memory = false, .in_step = true, .threads = true});
  auto loops = std::make_shared<std::vector<std::string>>();
  auto* loop = bench.add_subcommand(
      "loop", "steps of loops as users write them, with clipping, a schedule and so on");
  add_workload(*loop, *loop_options);
  add_turns(*loop, *loop_options);
  loop->add_option(
      "--loop", *loops,
      "switches with commas between them: clip, schedule, accumulate, evaluate, bf16, "
      "checkpoint, dropout; or all, or none. Several such loops are measured one after "
      "another; without this option none, each switch alone, and all");
  loop->callback([loop_options, loops, &exit_code] {
    exit_code =
        exit_code_of("tessera bench loop", [&] { return bench_loop(*loop_options, *loops); });
  });
}

void add_step_worker(CLI::App& bench, int& exit_code) {
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

void add_scale_bench(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<ScaleBenchOptions>();
  auto* scale = bench.add_subcommand(
      "scale", "the library's own work by the number of tensors, elements and ranks");
  scale->option_defaults()->always_capture_default();
  const auto add_axis = [&](const char* name, std::vector<int64_t>& sizes, const char* text) {
    scale->add_option(name, sizes, text)->delimiter(',')->check(kCount);
  };
  add_axis("--tensors", options->tensors, "of 64 elements, on 2 ranks that are threads");
  add_axis("--elements", options->elements, "of 100 tensors, on rank 0 of 1,024");
  add_axis("--threads", options->threads, "ranks that are threads, with 1,000 tensors");
  add_axis("--ranks", options->ranks, "of which only rank 0 is real, with 1,000 tensors");
  scale->add_option("--rounds", options->rounds, "of which the fastest counts")->check(kCount);
  scale->add_option("--directory", options->directory, "for checkpoints, which are removed");
  scale->add_flag("--json", options->json, "print one line of JSON");
  scale->callback([options, &exit_code] {
    exit_code = exit_code_of("tessera bench scale", [&] { return bench_scale(*options); });
  });
}

void add_link_bench(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<LinkBenchOptions>();
  options->step = {.transport = "auto", .rounds = 5, .steps = 3};
  auto* link = bench.add_subcommand(
      "link", "a training step over slow links between hosts, against the links' and cores' limit");
  add_workload(*link, options->step);
  link->add_option("--hosts", options->hosts, "network namespaces, made for this (needs root)");
  link->add_option("--ranks-per-host", options->ranks_per_host, "processes on each host")
      ->check(kCount);
  link->add_option("--mbit", options->mbit,
                   "bandwidth of each host's link, in 10^6 bits per second; 0: no limit");
  link->add_option("--congestion", options->congestion,
                   "the hosts' congestion control of TCP, as the kernel names it");
  link->add_option("--rounds", options->step.rounds, "turns of each")->check(kCount);
  link->add_option("--steps", options->step.steps, "timed steps in a turn")->check(kCount);
  link->add_option("--against", options->against,
                   "jobs of PyTorch in turns with it: fsdp2, ddp, with a comma between")
      ->delimiter(',')
      ->check(CLI::IsMember({"fsdp2", "ddp"}));
  link->add_option("--python", options->python,
                   "the Python for them, with PyTorch and Tessera's package");
  link->add_flag("--json", options->step.json, "print one line of JSON");
  link->callback([options, &exit_code] {
    exit_code = exit_code_of("tessera bench link", [&] { return bench_link(*options); });
  });

  auto* worker = bench.add_subcommand("link-worker", "one process of a transfer")->group("");
  worker->callback([&exit_code] {
    exit_code = exit_code_of("tessera bench link: a transfer's process", bench_link_worker);
  });
}

}  // namespace tessera::tools
