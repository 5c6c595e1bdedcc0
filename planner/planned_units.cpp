#include "planner/planned_units.h"

#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <set>

#include "base/files/untrusted.h"
#include "engine/model/check_plan.h"

namespace tessera {
namespace {

void check_foreseeable(const ShardPlan& plan) {
  TORCH_CHECK_NOT_IMPLEMENTED(!plan.mesh_dim,
                              "[plan_report] plan.mesh_dim is not supported: a list of sizes does "
                              "not say which parameters are DistTensors");
  TORCH_CHECK_NOT_IMPLEMENTED(!plan.memory_budget,
                              "[plan_report] plan.memory_budget is not supported: the size of "
                              "activations is not known; give plan.resident_bytes");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !plan.sync_buffers,
      "[plan_report] plan.sync_buffers is not supported: the list holds parameters, not buffers");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !plan.outer,
      "[plan_report] plan.outer is not supported: its report would have steps of two kinds. Report "
      "the plan without it and with one replica, for the steps between averages");
  TORCH_CHECK_NOT_IMPLEMENTED(plan.reduce_gradients,
                              "[plan_report] plan.reduce_gradients must be true: the bytes of a "
                              "reduction by the user are not known");
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
                        "[plan_report] parameters must have different names; got '", name,
                        "' twice");
    }
    if (!is_ignored) slots.push_back(slot_of(parameter));
  }
  TORCH_CHECK_VALUE(ignored.empty(), "[plan_report] plan.ignored names '",
                    ignored.empty() ? "" : *ignored.begin(), "', which the model does not have");
  TORCH_CHECK_VALUE(!slots.empty(),
                    "[plan_report] the model must have parameters to shard; it has none");
  return slots;
}

}  // namespace

ShardPlan foreseeable_plan(const ShardPlan& plan, bool sends_nothing) {
  check_foreseeable(plan);
  check_plan(plan);
  return with_defaults(plan, sends_nothing);
}

std::vector<UnitLayout> planned_units(const std::vector<ParameterSize>& parameters,
                                      const ShardPlan& plan, int ranks) {
  return lay_out(slots_of(parameters, plan), plan, ranks);
}

int64_t item_size(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

bool is_trainable(const UnitLayout& unit) { return unit.slots.front().requires_grad; }

bool frees(const UnitLayout& unit, int ranks) {
  return unit.level == ShardLevel::kParameters && ranks > 1;
}

std::vector<int64_t> freed_nbytes(const std::vector<UnitLayout>& units, int ranks) {
  std::vector<int64_t> nbytes;
  for (const UnitLayout& unit : units) nbytes.push_back(frees(unit, ranks) ? unit.nbytes() : 0);
  return nbytes;
}

PassOrder order_of_use(const std::vector<UnitLayout>& units, const std::vector<int>& forward_order,
                       const std::vector<int>& backward_order) {
  const int count = static_cast<int>(units.size());
  if (forward_order.empty() && backward_order.empty()) return registration_order(count);
  PassOrder pass;
  for (const bool forward : {true, false}) {
    for (const int unit : forward ? forward_order : backward_order) {
      TORCH_CHECK_VALUE(unit >= 0 && unit < count, "[plan_report] options.",
                        forward ? "forward_order" : "backward_order", " must name units from 0 to ",
                        count - 1, "; got ", unit);
      append_use(forward ? pass.forward : pass.backward, unit);
    }
  }
  std::vector<int> trainable;
  for (int unit = 0; unit < count; ++unit) {
    if (is_trainable(units[unit])) trainable.push_back(unit);
  }
  insert_missing(pass, trainable, registration_order(count).forward);
  return pass;
}

}  // namespace tessera
