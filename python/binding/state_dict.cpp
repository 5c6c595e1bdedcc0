#include "state_dict.h"

#include <ATen/core/List.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <utility>

namespace tessera::python {

std::optional<c10::IValue> to_value(const py::handle& value) {
  if (value.is_none()) return c10::IValue();
  if (THPVariable_Check(value.ptr())) return value.cast<at::Tensor>();
  if (THPDtype_Check(value.ptr())) return static_cast<int64_t>(value.cast<at::ScalarType>());
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (!py::isinstance<py::tuple>(value) && !py::isinstance<py::list>(value)) return std::nullopt;
  c10::List<double> numbers;
  for (const py::handle item : value) {
    if (!py::isinstance<py::float_>(item) && !py::isinstance<py::int_>(item)) return std::nullopt;
    numbers.push_back(item.cast<double>());
  }
  return c10::IValue(numbers);
}

py::object to_python(const c10::IValue& value, const py::handle& before) {
  if (value.isNone()) return py::none();
  if (value.isTensor()) return py::cast(value.toTensor());
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isDoubleList()) {
    const py::list items = py::cast(value.toDoubleVector());
    if (before && py::isinstance<py::list>(before)) return items;
    return py::tuple(items);
  }
  if (before && THPVariable_Check(before.ptr())) {
    const auto old = before.cast<at::Tensor>();
    return py::cast(at::full(old.sizes(), value.toScalar(), old.options()));
  }
  if (before && THPDtype_Check(before.ptr()))
    return py::cast(static_cast<at::ScalarType>(value.toInt()));
  if (value.isInt()) return py::int_(value.toInt());
  TORCH_CHECK_NOT_IMPLEMENTED(value.isDouble(), "[tessera] an optimizer of Python can't take a ",
                              value.tagKind());
  return py::float_(value.toDouble());
}

OptimizerStateDict::Values to_values(const py::dict& dict, bool is_state) {
  OptimizerStateDict::Values values;
  for (const auto& [key, item] : dict) {
    if (!py::isinstance<py::str>(key)) continue;
    const auto name = key.cast<std::string>();
    if (name == "params") continue;
    const auto value = to_value(item);
    TORCH_CHECK_NOT_IMPLEMENTED(
        value || !is_state,
        "[tessera] an optimizer's state must consist of tensors, numbers and text; '", name,
        "' is ", py::repr(item).cast<std::string>());
    if (value) values[name] = *value;
  }
  return values;
}

py::dict to_python(const OptimizerStateDict& dict, const py::object& optimizer) {
  py::dict result, states;
  for (const auto& [number, values] : dict.state) {
    py::dict state;
    for (const auto& [name, value] : values) state[name.c_str()] = to_python(value, py::handle());
    states[py::int_(number)] = state;
  }
  py::list groups;
  const py::object own = optimizer.attr("param_groups");
  for (size_t i = 0; i < dict.param_groups.size(); ++i) {
    py::dict group;
    for (const auto& [key, value] : own[py::int_(i)].cast<py::dict>()) group[key] = value;
    for (const auto& [name, value] : dict.param_groups[i].options)
      group[name.c_str()] =
          to_python(value, group.contains(name) ? group[name.c_str()] : py::handle());
    group["params"] = py::cast(dict.param_groups[i].params);
    groups.append(group);
  }
  result["state"] = states;
  result["param_groups"] = groups;
  for (const auto& [name, value] : dict.extra) {
    if (!value.isGenericDict()) continue;
    py::dict tensors;  // such as master weights by parameter
    for (const auto& item : value.toGenericDict())
      tensors[py::str(item.key().toStringRef())] = to_python(item.value(), py::handle());
    result[name.c_str()] = tensors;
  }
  return result;
}

OptimizerStateDict to_state_dict(const py::dict& dict) {
  OptimizerStateDict result;
  for (const char* const part : {"state", "param_groups"})
    TORCH_CHECK_VALUE(
        dict.contains(part),
        "[load_state_dict] the state of an optimizer must have 'state' and 'param_groups'; '", part,
        "' is missing");
  for (const auto& [number, state] : dict["state"].cast<py::dict>())
    result.state[number.cast<int64_t>()] = to_values(state.cast<py::dict>(), /*is_state=*/true);
  for (const py::handle group : dict["param_groups"]) {
    result.param_groups.push_back({.options = to_values(group.cast<py::dict>(), /*is_state=*/false),
                                   .params = group["params"].cast<std::vector<int64_t>>()});
  }
  for (const auto& [key, value] : dict) {
    const auto name = key.cast<std::string>();
    if (name == "state" || name == "param_groups" || !py::isinstance<py::dict>(value)) continue;
    c10::impl::GenericDict items(c10::StringType::get(), c10::AnyType::get());
    for (const auto& [inner, tensor] : value.cast<py::dict>())
      items.insert(inner.cast<std::string>(), *to_value(tensor));
    result.extra[name] = items;
  }
  return result;
}

}  // namespace tessera::python
