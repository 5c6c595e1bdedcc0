#include <c10/util/Exception.h>
#include <c10/util/strides.h>
#include <tessera/plan_report.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <set>

#include "checkpoint/untrusted.h"
#include "model/check_plan.h"
#include "model/named_tensors.h"
#include "optim/param_state.h"
#include "sim/planned_units.h"

namespace tessera {
namespace {

void check_options(const PlanReportOptions& options) {
  TORCH_CHECK_VALUE(options.ranks >= 1, "[plan_report] options.ranks must be at least 1; got ",
                    options.ranks);
  TORCH_CHECK_VALUE(options.replicas >= 1, "[plan_report] options.replicas must be at least 1; got ",
                    options.replicas);
  TORCH_CHECK_VALUE(options.rank >= 0 && options.rank < options.ranks,
                    "[plan_report] options.rank must be from 0 to ", options.ranks - 1, "; got ",
                    options.rank);
  TORCH_CHECK_VALUE(options.state_tensors >= 0,
                    "[plan_report] options.state_tensors must not be negative; got ",
                    options.state_tensors);
}

void check_foreseeable(const ShardPlan& plan) {
  TORCH_CHECK_NOT_IMPLEMENTED(!plan.mesh_dim, "[plan_report] plan.mesh_dim is not known on paper: a list "
                              "of sizes says nothing about DistTensors");
  TORCH_CHECK_NOT_IMPLEMENTED(!plan.memory_budget, "[plan_report] plan.memory_budget is not known on paper: what fits "
                              "depends on activations; give plan.resident_bytes");
  TORCH_CHECK_NOT_IMPLEMENTED(!plan.sync_buffers, "[plan_report] plan.sync_buffers is not known on paper: "
                              "the list holds parameters, not buffers");
  TORCH_CHECK_NOT_IMPLEMENTED(plan.reduce_gradients, "[plan_report] plan.reduce_gradients must be true: "
                              "what the user sends and keeps otherwise is not known");
}

ParamSlot slot_of(const ParameterSize& parameter) {
  TORCH_CHECK_VALUE(!parameter.names.empty(), "[plan_report] each parameter must have a name");
  const int64_t numel = CheckedShape(parameter.shape, item_size(parameter.dtype)).numel();
  const auto strides = c10::contiguous_strides(parameter.shape);
  return {.names = parameter.names,
          .sizes = parameter.shape,
          .strides = {strides.begin(), strides.end()},
          .dtype = parameter.dtype,
          .requires_grad = parameter.trainable,
          .numel = numel};
}

// Returns the parameters that the plan shards.
std::vector<ParamSlot> slots_of(const std::vector<ParameterSize>& parameters,
                                const ShardPlan& plan) {
  std::set<std::string> ignored(plan.ignored.begin(), plan.ignored.end());
  std::set<std::string> seen;
  std::vector<ParamSlot> slots;
  for (const ParameterSize& parameter : parameters) {
    bool is_ignored = false;
    for (const std::string& name : parameter.names) {
      is_ignored = ignored.erase(name) > 0 || is_ignored;
      TORCH_CHECK_VALUE(seen.insert(name).second,
                        "[plan_report] parameters must have different names; got '", name, "' twice");
    }
    if (!is_ignored) slots.push_back(slot_of(parameter));
  }
  TORCH_CHECK_VALUE(ignored.empty(), "[plan_report] plan.ignored names '",
                    ignored.empty() ? "" : *ignored.begin(), "', which the model does not have");
  TORCH_CHECK_VALUE(!slots.empty(), "[plan_report] the model must have parameters to shard; it has none");
  return slots;
}

double zero_paper_bytes(const std::vector<UnitLayout>& units, ShardLevel level,
                        const PlanReportOptions& options) {
  double parameters = 0, gradients = 0, state = 0;
  for (const UnitLayout& unit : units) {
    double numel = 0;
    for (const ParamSlot& slot : unit.slots) numel += static_cast<double>(slot.numel);
    const auto item = static_cast<double>(item_size(unit.dtype));
    const auto master_item = static_cast<double>(item_size(unit.master_dtype));
    parameters += numel * item;
    if (!is_trainable(unit)) continue;
    gradients += numel * item;
    state += numel * master_item * (options.state_tensors + (unit.has_master() ? 1 : 0));
  }
  if (level >= ShardLevel::kOptimizerState) state /= options.ranks;
  if (level >= ShardLevel::kGradients) gradients /= options.ranks;
  if (level >= ShardLevel::kParameters) parameters /= options.ranks;
  return parameters + gradients + state;
}

void list_units(PlanReport& report, const std::vector<UnitLayout>& units) {
  for (const UnitLayout& unit : units) {
    report.units.push_back(
        {unit.name, unit.numel(), unit.nbytes(), unit.level, is_trainable(unit)});
    for (const ParamSlot& slot : unit.slots) report.parameters += slot.numel;
    if (unit.nbytes() > report.units[report.largest_unit].nbytes)
      report.largest_unit = report.units.size() - 1;
  }
}

}  // namespace

int64_t PlannedRank::kept() const {
  return memory.parameters + memory.gradients + memory.optimizer_state + memory.master_weights +
         memory.offloaded;
}

PlanReport plan_report(const std::vector<ParameterSize>& parameters, const ShardPlan& wanted,
                       const PlanReportOptions& options) {
  check_options(options);
  check_plan(wanted);
  check_foreseeable(wanted);
  const ShardPlan plan = with_defaults(wanted, options.ranks == 1 || options.shares_memory);
  const auto units = lay_out(slots_of(parameters, plan), plan, options.ranks);
  const PlannedGathers gathers = plan_gathers(units, plan, options);
  const auto planned = [&](int rank) {
    PlannedRank result{rank, planned_memory(units, plan, options, rank)};
    if (options.shares_memory) return result;  // nothing is gathered or sent
    result.traffic = planned_traffic(units, gathers, plan, options, rank);
    result.memory.peak_unsharded = gathers.peak_bytes;
    return result;
  };
  PlanReport report;
  list_units(report, units);
  report.rank = planned(options.rank);
  report.fullest = report.busiest = planned(0);
  // Shards that are cut evenly are equal except for the padding, which only the last ones have.
  for (int rank = 1; rank < options.ranks; ++rank) {
    const PlannedRank other = planned(rank);
    if (other.kept() > report.fullest.kept()) report.fullest = other;
    if (other.traffic.bytes_sent() > report.busiest.traffic.bytes_sent()) report.busiest = other;
  }
  report.zero_paper_bytes = zero_paper_bytes(units, plan.level, options);
  return report;
}

std::vector<ParameterSize> parameter_sizes(const torch::nn::Module& module) {
  std::vector<ParameterSize> sizes;
  for (ParamSlot& slot : collect_parameters(named_tensors(module.named_parameters())))
    sizes.push_back({std::move(slot.names), std::move(slot.sizes), slot.dtype, slot.requires_grad});
  return sizes;
}

int state_tensors_of(torch::optim::Optimizer& optimizer) {
  std::set<size_t> counts;
  for (auto& param_group : optimizer.param_groups())
    counts.insert(state_names(optimizer, param_group).size());
  TORCH_CHECK_VALUE(counts.size() == 1,
                    "[state_tensors_of] all param groups must have the optimizer keep as many tensors for "
                    "a parameter; got ", counts.size(), " different numbers");
  return static_cast<int>(*counts.begin());
}

}  // namespace tessera
