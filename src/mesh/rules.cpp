#include "mesh/rules.h"

#include <c10/util/Exception.h>

#include <unordered_map>

namespace tessera {
namespace {

size_t index_of(const c10::FunctionSchema& schema, std::string_view name) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return i;
  }
  TORCH_INTERNAL_ASSERT(false, schema.name(), " has no argument ", std::string(name));
}

}  // namespace

const c10::IValue& OpCall::argument(std::string_view name) const {
  return arguments[index_of(schema, name)];
}

int OpCall::input(std::string_view name) const {
  const size_t index = index_of(schema, name);
  const c10::IValue& value = arguments[index];
  return value.isTensor() && value.toTensor().defined() ? first_input[index] : -1;
}

int64_t OpCall::dim(std::string_view name, int64_t ndim) const {
  const int64_t dim = argument(name).toInt();
  return dim < 0 ? dim + ndim : dim;
}

const RuleEntry* find_rule(std::string_view name) {
  static const auto* const rules = [] {
    auto* const map = new std::unordered_map<std::string_view, const RuleEntry*>();
    for (const auto family :
         {elementwise_rules(), matrix_rules(), view_rules(), reduction_rules(), model_rules()}) {
      for (const RuleEntry& entry : family) map->emplace(entry.name, &entry);
    }
    return map;
  }();
  const auto found = rules->find(name);
  return found == rules->end() ? nullptr : found->second;
}

}  // namespace tessera
