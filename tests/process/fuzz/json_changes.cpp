#include "process/fuzz/json_changes.h"

#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {
namespace {

using nlohmann::json;

// All values, parents before their children.
std::vector<json*> values_of(json& root) {
  std::vector<json*> values = {&root};
  for (size_t i = 0; i < values.size(); ++i)
    for (json& child : *values[i])
      if (values[i]->is_structured()) values.push_back(&child);
  return values;
}

void change_number(json& value, Draw& draw) {
  const auto number = static_cast<uint64_t>(value.get<int64_t>());
  const auto wrapped = [](uint64_t result) { return json(static_cast<int64_t>(result)); };
  const std::vector<json> results = {wrapped(number + 1),
                                     wrapped(number - 1),
                                     wrapped(number * 2),
                                     wrapped(0 - number),
                                     wrapped(INT64_MAX - number),
                                     wrapped(number + (uint64_t{1} << 32)),
                                     json(number + (uint64_t{1} << 63)),
                                     json(static_cast<double>(number) + 0.5),
                                     json(std::to_string(number))};
  value = draw.pick(results);
}

void change_children(json& value, Draw& draw) {
  const size_t place = draw.below(value.size());
  auto child = value.begin();
  std::advance(child, place);
  if (draw.chance(40)) {
    value.erase(child);
  } else if (value.is_array()) {
    const json copy = *child;
    for (size_t times = 1 + draw.below(draw.chance(90) ? 3 : 300); times > 0; --times)
      value.push_back(copy);
  } else {
    const json copy = *child;
    value[draw.text()] = copy;
  }
}

void change_once(json& root, Draw& draw) {
  const std::vector<json*> values = values_of(root);
  json& value = *draw.pick(values);
  if (value.is_number_integer() && draw.chance(50)) return change_number(value, draw);
  if (value.is_structured() && !value.empty() && draw.chance(60))
    return change_children(value, draw);
  if (draw.chance(20)) {
    const json copy = *draw.pick(values);
    value = copy;
  } else {
    value = draw.chance(60) ? json(draw.number()) : odd_value(draw);
  }
}

}  // namespace

json odd_value(Draw& draw) {
  if (draw.chance(3)) {
    json deep = json::array();
    for (size_t depth = 20 + draw.below(200); depth > 0; --depth) deep = json::array({deep});
    return deep;
  }
  const std::vector<json> values = {nullptr,
                                    true,
                                    0.5,
                                    1e300,
                                    json::array(),
                                    json::object(),
                                    "text",
                                    "-1",
                                    json({1, 2, 3}),
                                    json({{"a", 1}}),
                                    uint64_t{1} << 63,
                                    std::string(1000, 'y')};
  return draw.pick(values);
}

void change_json(json& root, Draw& draw) {
  for (size_t times = 1 + draw.below(3); times > 0; --times) change_once(root, draw);
}

}  // namespace tessera::testing
