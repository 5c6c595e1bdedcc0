#include "interop/python_optimizer.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>

#include "base/files/untrusted.h"

namespace tessera {
namespace {

// An option of a class of Python's, and the type of its value.
struct PythonOption {
  enum Type : uint8_t {
    kReal,
    kPair,  // `beta1` and `beta2` of the index
    kFlag,
    kOff,   // a flag that LibTorch has not: false
    kUnset  // a choice of Python's kernels, which LibTorch has not: None
  };
  const char* name;
  Type type;
};

// A class of Python's: its options in their order, and the names of the tensors that it keeps.
struct PythonClass {
  const char* name;
  std::vector<PythonOption> options;
  std::vector<const char*> tensors;
};

using Option = PythonOption;

PythonClass adam(const char* name) {
  return {name,
          {{"lr", Option::kReal},
           {"betas", Option::kPair},
           {"eps", Option::kReal},
           {"weight_decay", Option::kReal},
           {"amsgrad", Option::kFlag},
           {"maximize", Option::kOff},
           {"foreach", Option::kUnset},
           {"capturable", Option::kOff},
           {"differentiable", Option::kOff},
           {"fused", Option::kUnset}},
          {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}};
}

const std::vector<PythonClass>& python_classes() {
  static const std::vector<PythonClass> kClasses = {
      adam("AdamW"),
      adam("Adam"),
      {"SGD",
       {{"lr", Option::kReal},
        {"momentum", Option::kReal},
        {"dampening", Option::kReal},
        {"weight_decay", Option::kReal},
        {"nesterov", Option::kFlag},
        {"maximize", Option::kOff},
        {"foreach", Option::kUnset},
        {"differentiable", Option::kOff},
        {"fused", Option::kUnset}},
       {"momentum_buffer"}},
      {"Adagrad",
       {{"lr", Option::kReal},
        {"lr_decay", Option::kReal},
        {"eps", Option::kReal},
        {"weight_decay", Option::kReal},
        {"initial_accumulator_value", Option::kReal},
        {"foreach", Option::kUnset},
        {"maximize", Option::kOff},
        {"differentiable", Option::kOff},
        {"fused", Option::kUnset}},
       {"sum"}},
      {"RMSprop",
       {{"lr", Option::kReal},
        {"momentum", Option::kReal},
        {"alpha", Option::kReal},
        {"eps", Option::kReal},
        {"centered", Option::kFlag},
        {"weight_decay", Option::kReal},
        {"capturable", Option::kOff},
        {"foreach", Option::kUnset},
        {"maximize", Option::kOff},
        {"differentiable", Option::kOff}},
       {"square_avg", "momentum_buffer", "grad_avg"}}};
  return kClasses;
}

const PythonClass* find_class(const std::string& name) {
  const auto& classes = python_classes();
  const auto it = std::ranges::find_if(classes, [&](const auto& c) { return name == c.name; });
  return it == classes.end() ? nullptr : &*it;
}

// AdamW has the options of Adam; newer versions of Python's have a flag that tells them apart.
constexpr const char* kIsAdamW = "decoupled_weight_decay";

std::string class_of(const PythonGroup& group) {
  for (const PythonClass& known : python_classes()) {
    const bool has_all = std::ranges::all_of(known.options, [&](const Option& option) {
      return option.type == Option::kOff || option.type == Option::kUnset ||
             group.options.contains(option.name);
    });
    if (!has_all) continue;
    if (std::string_view(known.name) != "AdamW") return known.name;
    const auto it = group.options.find(kIsAdamW);
    TORCH_CHECK_VALUE(it != group.options.end(),
                      "its optimizer is Adam or AdamW, which PyTorch before 2.7 does not tell; "
                      "give options.optimizer_class");
    return !it->second.empty() && it->second[0] != 0 ? "AdamW" : "Adam";
  }
  std::vector<std::string> names;
  for (const auto& [name, value] : group.options) names.push_back(name);
  TORCH_CHECK_VALUE(
      false,
      "its optimizer must be Adagrad, Adam, AdamW, RMSprop or SGD; got one with the options ",
      shortened(names));
}

ParamGroupRecord group_record(const PythonGroup& group, const PythonClass& known) {
  ParamGroupRecord record{.options = {}, .params = group.params};
  for (const Option& option : known.options) {
    const auto it = group.options.find(option.name);
    const auto* const values = it == group.options.end() ? nullptr : &it->second;
    const size_t wanted = option.type == Option::kPair ? 2 : 1;
    if (option.type == Option::kUnset) continue;
    if (option.type == Option::kOff) {
      // `capturable` and `differentiable` choose kernels; `maximize` changes the step.
      TORCH_CHECK_VALUE(std::string_view(option.name) != "maximize" || !values || values->empty() ||
                            (*values)[0] == 0,
                        "its optimizer must not have 'maximize', which LibTorch's ", known.name,
                        " has not");
      continue;
    }
    TORCH_CHECK_VALUE(values && values->size() == wanted, "the option '", option.name, "' of ",
                      known.name, " must be ", wanted, " number(s); got ",
                      values ? values->size() : 0);
    if (option.type == Option::kPair) {
      record.options["beta1"] = (*values)[0];
      record.options["beta2"] = (*values)[1];
    } else {
      record.options[option.name] = values->front();
    }
  }
  return record;
}

}  // namespace

std::vector<double> numbers_of(const PickleValue& value) {
  if (const auto number = value.as_number()) return {*number};
  if (!value.is_list() || value.items.size() > CheckedShape::kMostDims) return {};
  std::vector<double> numbers;
  for (const PickleValue* item : value.items)
    if (const auto number = item->as_number()) numbers.push_back(*number);
  return numbers;
}

OptimizerRecord optimizer_record(const std::vector<PythonGroup>& groups,
                                 const std::string& wanted) {
  TORCH_CHECK_VALUE(!groups.empty(), "its optimizer must have param groups");
  OptimizerRecord record;
  record.kind = wanted.empty() ? class_of(groups.front()) : wanted;
  const PythonClass* const known = find_class(record.kind);
  TORCH_CHECK_VALUE(known,
                    "options.optimizer_class must be Adagrad, Adam, AdamW, RMSprop or SGD; got '",
                    wanted, "'");
  for (const PythonGroup& group : groups)
    record.param_groups.push_back(group_record(group, *known));
  return record;
}

void set_count(OptimizerRecord& optimizer, const std::string& param, const std::string& name,
               double value) {
  constexpr double kMost = 9007199254740992.;  // 2^53: whole numbers are exact up to it
  TORCH_CHECK_VALUE(value >= 0 && value <= kMost && value == std::floor(value), "the ", name,
                    " of '", param, "' must be a count; got ", value);
  const auto count = static_cast<int64_t>(value);
  optimizer.counts[param][name] = count;
  optimizer.steps = std::max(optimizer.steps, count);
}

bool take_state(TensorRecord& record, const TensorRecord& param, const std::string& state,
                ChunkReader& reader, OptimizerRecord& optimizer) {
  const std::string& name = param.names.front();
  if (state == "step") {
    TORCH_CHECK_VALUE(record.numel() == 1, "the step of '", name, "' must be one number");
    set_count(optimizer, name, state, reader.read_whole(record).item<double>());
    return false;
  }
  const auto& tensors = find_class(optimizer.kind)->tensors;
  TORCH_CHECK_VALUE(std::ranges::any_of(tensors, [&](const char* known) { return state == known; }),
                    "'", name, "' has the state '", shortened(state), "', which LibTorch's ",
                    optimizer.kind, " has not");
  TORCH_CHECK_VALUE(
      record.shape == param.shape, "'", state, "' of '", name, "' must have its shape, ",
      c10::IntArrayRef(param.shape), "; got ", c10::IntArrayRef(record.shape),
      ". Is the optimizer that of another model, or were its parameters in another order?");
  record.kind = "state";
  record.state = state;
  record.names = param.names;
  return true;
}

std::vector<std::pair<std::string, c10::IValue>> python_options(const OptimizerRecord& optimizer,
                                                                size_t group) {
  const auto& values = optimizer.param_groups[group].options;
  const auto value_of = [&](const char* name) {
    const auto it = values.find(name);
    TORCH_CHECK_VALUE(it != values.end(), "[export_checkpoint] param group ", group, " lacks '",
                      name, "'");
    return it->second;
  };
  const PythonClass* const known = find_class(optimizer.kind);
  TORCH_CHECK_NOT_IMPLEMENTED(known,
                              "[export_checkpoint] optimizer state can be exported for Adagrad, "
                              "Adam, AdamW, RMSprop and SGD; the checkpoint has that of ",
                              optimizer.kind);
  std::vector<std::pair<std::string, c10::IValue>> options;
  for (const auto& [name, type] : known->options) {
    switch (type) {
      case Option::kReal:
        options.emplace_back(name, value_of(name));
        break;
      case Option::kPair:
        options.emplace_back(name,
                             c10::ivalue::Tuple::create(value_of("beta1"), value_of("beta2")));
        break;
      case Option::kFlag:
        options.emplace_back(name, value_of(name) != 0);
        break;
      case Option::kOff:
        options.emplace_back(name, false);
        break;
      case Option::kUnset:
        options.emplace_back(name, c10::IValue());
        break;
    }
  }
  if (optimizer.kind == "AdamW" || optimizer.kind == "Adam")
    options.emplace_back(kIsAdamW, optimizer.kind == "AdamW");
  return options;
}

std::vector<std::pair<std::string, at::Tensor>> python_counts(const OptimizerRecord& optimizer,
                                                              const std::string& param) {
  std::vector<std::pair<std::string, at::Tensor>> counts;
  const auto it = optimizer.counts.find(param);
  if (it == optimizer.counts.end()) return counts;
  for (const auto& [name, count] : it->second)
    counts.emplace_back(name, at::full({}, static_cast<double>(count), at::kFloat));
  return counts;
}

}  // namespace tessera
