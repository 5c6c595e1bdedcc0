#include "plan.h"

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera::python {
namespace {

template <class Value>
using Names = std::map<std::string, Value>;

const Names<ShardLevel> kLevels = {{"none", ShardLevel::kNone},
                                   {"os", ShardLevel::kOptimizerState},
                                   {"os_g", ShardLevel::kGradients},
                                   {"p_g_os", ShardLevel::kParameters}};
const Names<Partition> kPartitions = {{"flat_even", Partition::kFlatEven},
                                      {"whole_param", Partition::kWholeParam}};
const Names<StartValues> kStartValues = {{"broadcast", StartValues::kBroadcast},
                                         {"keep", StartValues::kKeep}};
const Names<Offload> kOffloads = {
    {"none", Offload::kNone}, {"host", Offload::kHost}, {"directory", Offload::kDirectory}};

template <class Value>
Value choice(const char* argument, const Names<Value>& names, const py::handle& given) {
  const std::string name = py::isinstance<py::str>(given) ? given.cast<std::string>() : "";
  const auto it = names.find(name);
  if (it != names.end()) return it->second;
  std::string text = std::string("[fully_shard] ") + argument + " must be one of";
  for (const auto& [known, value] : names) text += " '" + known + "'";
  throw py::value_error(text + "; got " + py::repr(given).cast<std::string>());
}

using Set = std::function<void(ShardPlan&, const py::handle&)>;

template <class Value>
Set field(Value ShardPlan::*member) {
  return [=](ShardPlan& plan, const py::handle& value) { plan.*member = value.cast<Value>(); };
}
template <class Value>
Set field(Value Precision::*member) {
  return [=](ShardPlan& plan, const py::handle& value) {
    plan.precision.*member = value.cast<Value>();
  };
}
template <class Value>
Set field(Value ShardPlan::*member, const char* argument, const Names<Value>& names) {
  return [=, &names](ShardPlan& plan, const py::handle& value) {
    plan.*member = choice(argument, names, value);
  };
}

// A number of steps, or a dict with the fields of `OuterStep`.
void set_outer(ShardPlan& plan, const py::handle& value) {
  if (value.is_none()) return plan.outer.reset();
  OuterStep outer;
  if (!py::isinstance<py::dict>(value)) {
    outer.every = value.cast<int>();
    plan.outer = outer;
    return;
  }
  for (const auto& [key, item] : value.cast<py::dict>()) {
    const auto name = key.cast<std::string>();
    if (name == "every") {
      outer.every = item.cast<int>();
    } else if (name == "learning_rate") {
      outer.learning_rate = item.cast<double>();
    } else if (name == "momentum") {
      outer.momentum = item.cast<double>();
    } else if (name == "nesterov") {
      outer.nesterov = item.cast<bool>();
    } else {
      throw py::type_error(
          "[fully_shard] outer has every, learning_rate, momentum and nesterov; got '" + name +
          "'");
    }
  }
  plan.outer = outer;
}

const Names<Set> kFields = {
    {"level", field(&ShardPlan::level, "level", kLevels)},
    {"partition", field(&ShardPlan::partition, "partition", kPartitions)},
    {"unit_bytes", field(&ShardPlan::unit_bytes)},
    {"owners", field(&ShardPlan::owners)},
    {"ignored", field(&ShardPlan::ignored)},
    {"unreplicated", field(&ShardPlan::unreplicated)},
    {"units", field(&ShardPlan::units)},
    {"whole_numel", field(&ShardPlan::whole_numel)},
    {"whole", field(&ShardPlan::whole)},
    {"resident_bytes", field(&ShardPlan::resident_bytes)},
    {"memory_budget", field(&ShardPlan::memory_budget)},
    {"prefetch", field(&ShardPlan::prefetch)},
    {"average", field(&ShardPlan::average)},
    {"predivide", field(&ShardPlan::predivide)},
    {"bucket_bytes", field(&ShardPlan::bucket_bytes)},
    {"device", field(&ShardPlan::device)},
    {"start_values", field(&ShardPlan::start_values, "start_values", kStartValues)},
    {"sync_buffers", field(&ShardPlan::sync_buffers)},
    {"group", field(&ShardPlan::process_group)},
    {"mesh_dim", field(&ShardPlan::mesh_dim)},
    {"replicate_group", field(&ShardPlan::replicate_group)},
    {"outer", set_outer},
    {"offload", field(&ShardPlan::offload, "offload", kOffloads)},
    {"offload_directory", field(&ShardPlan::offload_directory)},
    {"param_dtype", field(&Precision::param_dtype)},
    {"master_dtype", field(&Precision::master_dtype)},
    {"reduce_dtype", field(&Precision::reduce_dtype)},
    {"error_feedback", field(&Precision::error_feedback)},
    {"gather_dtype", field(&Precision::gather_dtype)},
    {"master_only", field(&Precision::master_only)},
    {"buffer_dtype", field(&Precision::buffer_dtype)},
    {"cast_inputs", field(&Precision::cast_inputs)},
};

}  // namespace

ShardLevel level_of(const std::string& name) {
  const auto it = kLevels.find(name);
  if (it == kLevels.end())
    throw py::value_error("level must be 'none', 'os', 'os_g' or 'p_g_os'; got '" + name + "'");
  return it->second;
}

void set_fields(ShardPlan& plan, const py::dict& arguments) {
  for (const auto& [key, value] : arguments) {
    const auto name = key.cast<std::string>();
    const auto it = kFields.find(name);
    if (it == kFields.end()) {
      std::string text =
          "fully_shard() got an unexpected keyword argument '" + name + "'; a plan has";
      for (const auto& [known, set] : kFields) text += " " + known;
      throw py::type_error(text);
    }
    try {
      it->second(plan, value);
    } catch (const py::cast_error&) {
      throw py::type_error("fully_shard() got a value of the wrong type for '" + name +
                           "': " + py::repr(value).cast<std::string>());
    }
  }
}

ShardPlan plan_of(const py::dict& arguments) {
  ShardPlan plan;
  set_fields(plan, arguments);
  return plan;
}

}  // namespace tessera::python
