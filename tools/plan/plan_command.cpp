#include "plan/plan_command.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "level_names.h"
#include "plan/plan_table.h"
#include "plan/step_arguments.h"
#include "plan/step_table.h"

namespace tessera::tools {
namespace {

constexpr const char* kPlanFooter = R"(
FILE is a safetensors file, a directory with such files (an index says which of them are the model's), a
checkpoint of Tessera's, or a list: a line for each parameter, `name dtype size...`, with ` frozen` at the end
if it is not trained; # begins a comment. No tensor is read.

A step is a forward, a backward that gives all parameters gradients, and a step of the optimizer, after
those in which the order of use was learned. Units are used in the order of the list, and back. What is kept
is shown for ranks that send messages, and for ranks of one host that share memory: those send none, and keep
parameters once for all of them at every level but none.

The last line is what the formulas of the ZeRO paper (Rajbhandari et al., 2020) give. Its numbers:
  tessera plan --parameters 7.5e9 --ranks 64 --param-dtype float16

With --compute, the time of a step is predicted, and all that it assumes is printed:
  tessera plan FILE --hosts 64 --ranks-per-host 8 --link 200Mbit --link-latency 0.1ms --compute 2.5)";

struct PlanArguments {
  std::string file;
  double parameters = 0;
  int layers = 32;
  std::string level, partition = "even", optimizer = "adamw", offload = "none";
  std::string param_dtype, master_dtype, reduce_dtype, gather_dtype;
  ShardPlan plan;
  PlanReportOptions options;
  std::optional<int> ranks;
  StepArguments step;
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
      {"rmsprop", maker<RMSprop>(RMSpropOptions())}};
  return makers;
}

template <class Values>
std::vector<std::string> names_of(const Values& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
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
         "adamw (default), adam, amsgrad, sgd, momentum, adagrad or rmsprop",
         names_of(optimizers()));
  choice("--offload", arguments.offload,
         "Where optimizer state lies: none (default), host, directory",
         {"none", "host", "directory"});
  plan.add_option("--unit-bytes", arguments.plan.unit_bytes,
                  "Bytes of a unit; 0: one per parameter (default: 10 MiB)")
      ->type_name("BYTES");
  plan.add_option("--prefetch", arguments.plan.prefetch,
                  "Units gathered ahead of use at p_g_os (default 1)")
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
  plan.partition = arguments.partition == "whole" ? Partition::kWholeParam : Partition::kFlatEven;
  plan.precision = {.param_dtype = dtype_of(arguments.param_dtype),
                    .master_dtype = dtype_of(arguments.master_dtype),
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

std::string text_of_plan(const PlanArguments& arguments) {
  PlanReportOptions options = arguments.options;
  const auto step = arguments.step.options(arguments.ranks);
  options.ranks = step ? step->ranks() : arguments.ranks.value_or(1);
  TORCH_CHECK_VALUE(!step || options.replicas == 1,
                    "the time of a step is not known for --replicas; got ", options.replicas);
  options.state_tensors = state_tensors_of(*optimizers().at(arguments.optimizer)());
  const auto sizes = sizes_of(arguments);
  ShardPlan plan = plan_of(arguments);
  std::vector<LevelReport> reports;
  StepTimes times;
  for (const auto& [name, level] : kLevels) {
    if (!arguments.level.empty() && arguments.level != name) continue;
    plan.level = level;
    options.shares_memory = false;
    reports.push_back({name, plan_report(sizes, plan, options), {}});
    options.shares_memory = true;
    reports.back().shared = plan_report(sizes, plan, options);
    if (step) times.emplace_back(name, step_time(sizes, plan, *step));
  }
  if (!arguments.json) return plan_table(reports, options) + (step ? step_table(times, *step) : "");
  auto json = plan_json(reports, options);
  if (step) json["step_time"] = step_json(times, *step);
  return json.dump() + "\n";
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
  arguments->step.add_to(*plan);
  plan->add_flag("--json", arguments->json, "Print one line of JSON");
  plan->footer(kPlanFooter);
  plan->callback([arguments, &exit_code] {
    try {
      // Write errors are checked when the command is over.
      std::fputs(text_of_plan(*arguments).c_str(), stdout);
      exit_code = 0;
    } catch (const c10::Error& error) {
      throw CLI::ValidationError(error.what_without_backtrace());
    } catch (const std::exception& error) {
      throw CLI::ValidationError(error.what());
    }
  });
}

}  // namespace tessera::tools
