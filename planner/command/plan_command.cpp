#include "planner/command/plan_command.h"

#include <fmt/format.h>
#include <tessera/engine/cpu_adam.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "command/level_names.h"
#include "planner/command/fit_table.h"
#include "planner/command/memory_arguments.h"
#include "planner/command/plan_job.h"
#include "planner/command/plan_table.h"
#include "planner/command/step_arguments.h"
#include "planner/command/step_table.h"

namespace tessera::tools {
namespace {

constexpr const char* kPlanFooter = R"(
FILE is a safetensors file, a directory with such files (an index says which of them are the model's), a
config.json of Hugging Face's (gpt2, llama, mistral, qwen2, qwen3) or a directory that has one and no weights, a
checkpoint of Tessera's or a directory of them, or a list: a line for each parameter, `name dtype size...`, with
` frozen` at the end if it is not trained; # begins a comment. No tensor is read.

Does it fit? With --memory (of each rank) or --host-memory, the answer is printed, and if a level does not fit,
what it would need with one change, or with several:
  tessera plan examples/models/Llama-3-8B --ranks 8 --memory 80GB --master-dtype float32 --batch 1 --sequence 8192
The exit status is 0 if a level fits (the one of --level, if that is given), 3 if none does, and 2 for wrong
arguments. --table shows the memory over numbers of ranks.

A step is a forward, a backward that gives all parameters gradients, and a step of the optimizer, after
those in which the order of use was learned. Units are used in the order of the list, and back. What is kept
is shown for ranks that send messages, and for ranks of one host that share memory: those send none, and keep
parameters once for all of them at every level but none.

The last line is what the formulas of the ZeRO paper (Rajbhandari et al., 2020) give. Its numbers:
  tessera plan --parameters 7.5e9 --ranks 64 --param-dtype float16

With --compute, the time of a step is predicted, and all that it assumes is printed:
  tessera plan FILE --hosts 64 --ranks-per-host 8 --link 200Mbit --link-latency 0.1ms --compute 2.5)";

constexpr int kDoesNotFit = 3;

struct PlanArguments {
  std::string file;
  double parameters = 0;
  int layers = 32;
  std::string level, partition = "even", optimizer = "adamw", offload = "none";
  std::vector<std::string> cuts, muon_exceptions;
  std::string param_dtype, master_dtype, reduce_dtype, gather_dtype;
  ShardPlan plan;
  PlanReportOptions options;
  std::optional<int> ranks;
  StepArguments step;
  MemoryArguments memory;
  bool json = false;
};

// Makes an optimizer of each name, to find out which state it keeps.
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>()>;
template <class O, class Options>
MakeOptimizer maker(const Options& options) {
  return [options] {
    return std::make_unique<O>(std::vector<torch::Tensor>{torch::zeros({1})}, options);
  };
}
const std::map<std::string, MakeOptimizer>& optimizers() {
  using namespace torch::optim;
  static const std::map<std::string, MakeOptimizer> makers = {
      {"adamw", maker<AdamW>(AdamWOptions())},
      {"adam", maker<Adam>(AdamOptions())},
      {"amsgrad", maker<Adam>(AdamOptions().amsgrad(true))},
      {"sgd", maker<SGD>(SGDOptions(0.1))},
      {"momentum", maker<SGD>(SGDOptions(0.1).momentum(0.9))},
      {"adagrad", maker<Adagrad>(AdagradOptions())},
      {"rmsprop", maker<RMSprop>(RMSpropOptions())},
      {"cpuadam", maker<CPUAdam>(CPUAdamOptions())},
      {"cpuadam-bf16", maker<CPUAdam>(CPUAdamOptions())},
      {"cpuadam-8bit", maker<CPUAdam>(CPUAdamOptions())}};
  return makers;
}
const std::map<std::string, at::ScalarType> kStateDtypes = {
    {"cpuadam", at::kFloat}, {"cpuadam-bf16", at::kBFloat16}, {"cpuadam-8bit", at::kByte}};

template <class Values>
std::vector<std::string> names_of(const Values& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

std::vector<std::string> with_muon(std::vector<std::string> names) {
  names.emplace_back("muon");
  return names;
}

int64_t number_in(const std::string& text, const std::string& rule) {
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data(), end, number);
  TORCH_CHECK_VALUE(error == std::errc() && last == end, "--cut ", rule,
                    ": a size and a number of dims must be whole numbers; got '", text, "'");
  return number;
}

CutRule cut_rule_of(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ':');) parts.push_back(part);
  const auto cut = parts.size() > 1 ? find_plan_choice<Cut>(parts[1]) : std::nullopt;
  TORCH_CHECK_VALUE(cut && parts.size() <= 4,
                    "--cut must be NAMES:CUT, NAMES:CUT:SIZE or NAMES:CUT:SIZE:DIM, with a CUT of "
                    "anywhere, rows, elements or whole; got '",
                    text, "'");
  CutRule rule{.names = parts[0], .cut = *cut};
  if (parts.size() > 2) rule.size = number_in(parts[2], text);
  if (parts.size() > 3) rule.min_dim = number_in(parts[3], text);
  return rule;
}

// The rules that were given come first.
void use_muon(PlanJob& job, const std::vector<std::string>& exceptions) {
  job.options.muon = exceptions;
  for (CutRule& rule : muon_cuts(job.sizes, exceptions)) job.plan.cuts.push_back(std::move(rule));
}

void add_model_options(CLI::App& plan, PlanArguments& arguments) {
  auto* file =
      plan.add_option("FILE", arguments.file, "The sizes of the model's parameters")->type_name("");
  auto* parameters = plan.add_option("--parameters", arguments.parameters,
                                     "In place of FILE: so many float32 parameters, such as 7.5e9")
                         ->check(CLI::Range(1.0, 9e15))
                         ->type_name("N")
                         ->excludes(file);
  plan.add_option("--layers", arguments.layers,
                  "Of --parameters: in so many tensors of equal size (default 32)")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("N")
      ->needs(parameters);
}

void add_world_options(CLI::App& plan, PlanArguments& arguments) {
  PlanReportOptions& options = arguments.options;
  plan.add_option("--ranks", arguments.ranks, "Ranks that shards are spread over (default 1)")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("N");
  plan.add_option("--replicas", options.replicas,
                  "Replicas of each shard, on more ranks (default 1)")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("N");
  plan.add_option("--rank", options.rank, "The one of --ranks to report on (default 0)")
      ->check(CLI::Range(0, 1 << 20))
      ->type_name("N");
}

void add_plan_options(CLI::App& plan, PlanArguments& arguments) {
  const auto choice = [&](const char* option, std::string& value, const std::string& text,
                          const std::vector<std::string>& names) {
    plan.add_option(option, value, text)->check(CLI::IsMember(names))->type_name("");
  };
  choice("--level", arguments.level, "none, os, os_g or p_g_os (default: all four)",
         names_of(kLevels));
  choice("--partition", arguments.partition,
         "even: units are cut into equal shards (default); whole: each parameter has an owner",
         {"even", "whole"});
  choice("--optimizer", arguments.optimizer,
         "adamw (default), adam, amsgrad, sgd, momentum, adagrad, rmsprop, muon, or cpuadam, with "
         "state in float, cpuadam-bf16 or cpuadam-8bit, whose blocks are not cut",
         with_muon(names_of(optimizers())));
  plan.add_option("--muon-except", arguments.muon_exceptions,
                  "With --optimizer muon: names or patterns of matrices that AdamW steps, such as "
                  "embeddings and heads; may be given several times")
      ->take_all()
      ->type_name("NAMES");
  plan.add_option("--cut", arguments.cuts,
                  "Where parameters of at least DIM dims may be cut: whole, rows, elements or "
                  "anywhere, in blocks of SIZE; may be given several times")
      ->take_all()
      ->type_name("NAMES:CUT[:SIZE[:DIM]]");
  choice("--offload", arguments.offload,
         "Where optimizer state lies: none (default), host, directory",
         {"none", "host", "directory"});
  plan.add_option("--unit-bytes", arguments.plan.unit_bytes,
                  "Bytes of a unit; 0: one per parameter (default: 4 MiB)")
      ->type_name("BYTES");
  plan.add_option("--prefetch", arguments.plan.prefetch,
                  "Units gathered ahead of use at p_g_os (default 2)")
      ->type_name("N");
  plan.add_option("--resident-bytes", arguments.plan.resident_bytes,
                  "Gathered bytes that may stay between two uses at p_g_os; -1: all (default 0)")
      ->type_name("BYTES");
  plan.add_option("--whole-numel", arguments.plan.whole_numel,
                  "At p_g_os, parameters of so many elements stay whole (default 0)")
      ->type_name("N");
}

void add_dtype_options(CLI::App& plan, PlanArguments& arguments) {
  plan.add_option("--param-dtype", arguments.param_dtype, "Parameters are used in this dtype")
      ->type_name("DTYPE");
  plan.add_option("--master-dtype", arguments.master_dtype,
                  "Narrower parameters have master weights of this dtype")
      ->type_name("DTYPE");
  plan.add_flag("--round-frozen", arguments.plan.precision.round_frozen,
                "Frozen parameters keep no values beside those of --param-dtype");
  plan.add_option("--reduce-dtype", arguments.reduce_dtype, "Gradients are sent in this dtype")
      ->type_name("DTYPE");
  plan.add_option("--gather-dtype", arguments.gather_dtype,
                  "Updated parameters are sent in this dtype")
      ->type_name("DTYPE");
}

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  return name.empty() ? std::nullopt : std::optional(parse_dtype(name));
}

ShardPlan plan_of(const PlanArguments& arguments) {
  ShardPlan plan = arguments.plan;
  for (const std::string& cut : arguments.cuts) plan.cuts.push_back(cut_rule_of(cut));
  plan.partition = arguments.partition == "whole" ? Partition::kWholeParam : Partition::kFlatEven;
  plan.precision = {.param_dtype = dtype_of(arguments.param_dtype),
                    .master_dtype = dtype_of(arguments.master_dtype),
                    .round_frozen = plan.precision.round_frozen,
                    .reduce_dtype = dtype_of(arguments.reduce_dtype),
                    .gather_dtype = dtype_of(arguments.gather_dtype)};
  if (arguments.offload != "none")
    plan.offload = arguments.offload == "host" ? Offload::kHost : Offload::kDirectory;
  return plan;
}

std::vector<ParameterSize> sizes_of(const PlanArguments& arguments) {
  if (!arguments.file.empty()) return read_parameter_sizes(arguments.file);
  TORCH_CHECK_VALUE(arguments.parameters > 0, "FILE or --parameters is required");
  TORCH_CHECK_VALUE(arguments.parameters == std::floor(arguments.parameters),
                    "--parameters must be a whole number; got ", arguments.parameters);
  return made_up_parameter_sizes(static_cast<int64_t>(arguments.parameters), arguments.layers,
                                 at::kFloat);
}

// Returns the job, without the model.
PlanJob job_of(const PlanArguments& arguments, const std::optional<StepTimeOptions>& step) {
  PlanJob job{.plan = plan_of(arguments), .options = arguments.options};
  job.options.ranks = step ? step->ranks() : arguments.ranks.value_or(1);
  TORCH_CHECK_VALUE(!step || job.options.replicas == 1,
                    "the time of a step is not known for --replicas; got ", job.options.replicas);
  const bool is_muon = arguments.optimizer == "muon";
  TORCH_CHECK_VALUE(is_muon || arguments.muon_exceptions.empty(),
                    "--muon-except needs --optimizer muon; got ", arguments.optimizer);
  if (!is_muon)
    job.options.state_tensors = state_tensors_of(*optimizers().at(arguments.optimizer)());
  if (const auto it = kStateDtypes.find(arguments.optimizer); it != kStateDtypes.end())
    job.options.state_dtype = it->second;
  if (job.options.state_dtype == at::kByte && job.plan.partition == Partition::kFlatEven)
    job.plan.cuts.push_back(cpu_adam_cuts().front());  // after the rules that were given
  job.ranks_per_host = arguments.step.ranks_per_host(job.options.ranks);
  TORCH_CHECK_VALUE(job.ranks_per_host <= job.all_ranks(),
                    "--ranks-per-host must be at most the number of ranks, ", job.all_ranks(),
                    "; got ", job.ranks_per_host);
  return job;
}

std::vector<std::string> levels_of(const PlanArguments& arguments) {
  if (!arguments.level.empty()) return {arguments.level};
  return names_of(kLevels);
}

std::vector<LevelReport> level_reports(const PlanJob& job, const std::vector<std::string>& levels) {
  std::vector<LevelReport> reports;
  for (const std::string& level : levels)
    reports.push_back({level, job.report(kLevels.at(level)), job.report(kLevels.at(level), true)});
  return reports;
}

// All that the command computes.
struct PlanResults {
  PlanJob job;
  std::vector<std::string> levels;
  std::optional<FitReport> fit;
  RankTable table;
  std::optional<StepTimeOptions> step;
  StepTimes times;
};

PlanResults compute(const PlanArguments& arguments) {
  const auto step = arguments.step.options(arguments.ranks);
  const auto table_ranks = arguments.memory.table_ranks();
  PlanResults results{.job = job_of(arguments, step), .levels = levels_of(arguments), .step = step};
  PlanJob& job = results.job;
  arguments.memory.apply(job, arguments.file);
  if (job.sizes.empty()) job.sizes = sizes_of(arguments);
  if (arguments.optimizer == "muon") use_muon(job, arguments.muon_exceptions);
  results.table = rank_table(job, results.levels, table_ranks);
  if (arguments.memory.asks_for_peak())
    results.fit = fit_report(job, results.levels, arguments.memory.limits());
  if (!step) return results;
  for (const std::string& level : results.levels) {
    ShardPlan plan = job.plan;
    plan.level = kLevels.at(level);
    results.times.emplace_back(level, step_time(job.sizes, plan, *step));
  }
  return results;
}

std::string json_of(const PlanResults& results, const MemoryLimits& limits) {
  auto json = plan_json(level_reports(results.job, results.levels), results.job.options);
  json["activations"] = activations_json(results.job);
  if (results.fit) json["fit"] = fit_json(*results.fit, limits);
  if (!results.table.empty()) json["table"] = rank_table_json(results.table, limits);
  if (results.step) json["step_time"] = step_json(results.times, *results.step);
  return json.dump() + "\n";
}

// Beside the answer whether it fits, a table of what is sent would distract.
std::string text_of(const PlanResults& results, const MemoryLimits& limits) {
  const auto& [job, levels, fit, table, step, times] = results;
  const bool is_short = limits.any() || !table.empty();
  std::string text = is_short ? plan_heading(job.sizes, job.options)
                              : plan_table(level_reports(job, levels), job.options);
  if (fit) text += (is_short ? "" : "\n") + fit_table(*fit, job, limits);
  if (!table.empty()) text += (fit ? "\n" : "") + rank_table_text(table, limits);
  if (fit || !table.empty()) text += memory_assumptions(job);
  if (step) text += step_table(times, *step);
  return text;
}

// Prints the results and returns the exit status. Write errors are checked when the command is
// over.
int run_plan(const PlanArguments& arguments) {
  const MemoryLimits& limits = arguments.memory.limits();
  const PlanResults results = compute(arguments);
  std::fputs((arguments.json ? json_of(results, limits) : text_of(results, limits)).c_str(),
             stdout);
  return limits.any() && !results.fit->any_fits() ? kDoesNotFit : 0;
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<PlanArguments>();
  CLI::App* plan = app.add_subcommand("plan", "Computes the memory and traffic of each rank");
  plan->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_model_options(*plan, *arguments);
  add_world_options(*plan, *arguments);
  add_plan_options(*plan, *arguments);
  add_dtype_options(*plan, *arguments);
  arguments->memory.add_to(*plan);
  arguments->step.add_to(*plan);
  plan->add_flag("--json", arguments->json, "Print one line of JSON");
  plan->footer(kPlanFooter);
  plan->callback([arguments, &exit_code] {
    try {
      exit_code = run_plan(*arguments);
    } catch (const c10::Error& error) {
      throw CLI::ValidationError(error.what_without_backtrace());
    } catch (const std::exception& error) {
      throw CLI::ValidationError(error.what());
    }
  });
}

}  // namespace tessera::tools
