#include "plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/engine/plan_fields.h>

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>

namespace tessera::python {
namespace {

template <class Enum>
void assign(Enum& field, std::string_view argument,
            const py::handle& given) requires std::is_enum_v<Enum> {
  const std::string name = py::isinstance<py::str>(given) ? given.cast<std::string>() : "";
  if (const auto choice = find_plan_choice<Enum>(name)) {
    field = *choice;
    return;
  }
  std::string text = fmt::format("[fully_shard] {} must be one of", argument);
  for (const auto& known : kPlanChoices<Enum>) text += fmt::format(" '{}'", known.name);
  throw py::value_error(text + "; got " + py::repr(given).cast<std::string>());
}

// A number of steps, or a dict with the fields of `OuterStep`.
void assign(std::optional<OuterStep>& field, std::string_view /*argument*/,
            const py::handle& value) {
  if (value.is_none()) return field.reset();
  OuterStep outer;
  if (!py::isinstance<py::dict>(value)) {
    outer.every = value.cast<int>();
    field = outer;
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
    } else if (name == "reduce_dtype") {
      outer.reduce_dtype = item.cast<std::optional<at::ScalarType>>();
    } else {
      throw py::type_error(
          "[fully_shard] outer has every, learning_rate, momentum, nesterov and reduce_dtype; got "
          "'" +
          name + "'");
    }
  }
  field = outer;
}

// A list of tuples: names, cut, and, if they are given, size and min_dim.
void assign(std::vector<CutRule>& field, std::string_view argument, const py::handle& value) {
  field.clear();
  for (const py::handle& item : value) {
    const auto given = item.cast<py::tuple>();
    if (given.size() < 2 || given.size() > 4)
      throw py::value_error(
          "[fully_shard] a rule of cuts must be (names, cut), (names, cut, size) or (names, cut, "
          "size, min_dim); got " +
          py::repr(item).cast<std::string>());
    CutRule rule{.names = given[0].cast<std::string>()};
    assign(rule.cut, argument, given[1]);
    if (given.size() > 2) rule.size = given[2].cast<int64_t>();
    if (given.size() > 3) rule.min_dim = given[3].cast<int64_t>();
    field.push_back(rule);
  }
}

// A list of tuples: names, and a process group.
void assign(std::vector<GroupRule>& field, std::string_view /*argument*/, const py::handle& value) {
  field.clear();
  for (const py::handle& item : value) {
    const auto given = item.cast<std::pair<std::string, ProcessGroupPtr>>();
    field.push_back({given.first, given.second});
  }
}

template <class Value>
void assign(Value& field, std::string_view /*argument*/,
            const py::handle& value) requires(!std::is_enum_v<Value>) {
  field = value.cast<Value>();
}

// The keyword of a field. Those of `precision` have their own names, and `reduce_gradients` none:
// who reduces by hand uses the C++ interface.
std::string_view keyword_of(std::string_view field) {
  if (field == "process_group") return "group";
  if (field == "reduce_gradients") return "";
  return field.substr(field.rfind('.') + 1);  // npos + 1 is 0
}

}  // namespace

ShardLevel level_of(const std::string& name) {
  if (const auto level = find_plan_choice<ShardLevel>(name)) return *level;
  throw py::value_error("level must be 'none', 'os', 'os_g' or 'p_g_os'; got '" + name + "'");
}

void set_fields(ShardPlan& plan, const py::dict& arguments) {
  for (const auto& [key, value] : arguments) {
    const auto name = key.cast<std::string>();
    std::set<std::string_view> keywords;
    try {
      const auto set = [&, &given = value](std::string_view field, auto& member) {
        const std::string_view keyword = keyword_of(field);
        if (keyword.empty()) return;
        keywords.insert(keyword);
        if (keyword == name) assign(member, keyword, given);
      };
      visit_fields(set, plan);
    } catch (const py::cast_error&) {
      throw py::type_error("fully_shard() got a value of the wrong type for '" + name +
                           "': " + py::repr(value).cast<std::string>());
    }
    if (!keywords.contains(name))
      throw py::type_error(
          fmt::format("fully_shard() got an unexpected keyword argument '{}'; a plan has {}", name,
                      fmt::join(keywords, " ")));
  }
}

ShardPlan plan_of(const py::dict& arguments) {
  ShardPlan plan;
  set_fields(plan, arguments);
  return plan;
}

}  // namespace tessera::python
