#include "mesh/strict.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/dist_debug.h>
#include <tessera/dist_tensor.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "device/scoped_value.h"
#include "dispatch/each_tensor.h"

namespace tessera {
namespace {

constexpr std::string_view kStrictName = "tessera strict operators";
const ScopedValue<bool> kStrict(&kStrictName, 201);
thread_local std::shared_ptr<const DistParameter> last_parameter;

std::string module_of(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "the root" : "'" + parameter.substr(0, dot) + "'";
}

// The module of a call: that of a parameter among its arguments, or else of the last one used
// before.
std::string place_of(at::ArrayRef<c10::IValue> arguments) {
  std::string place;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      const DistMeta* const meta = find_dist_meta(tensor);
      if (place.empty() && meta && meta->parameter && !meta->parameter->name.empty())
        place = fmt::format(" in module {}, with parameter '{}'", module_of(meta->parameter->name),
                            meta->parameter->name);
    });
  }
  if (!place.empty()) return place;
  if (!last_parameter || last_parameter->name.empty()) return "";
  return fmt::format(" after module {} used its parameter '{}'", module_of(last_parameter->name),
                     last_parameter->name);
}

}  // namespace

StrictOperators::StrictOperators(bool is_strict) : scope_(kStrict.scope(is_strict)) {}
StrictOperators::~StrictOperators() = default;

bool is_strict() {
  static const bool is_environment_strict = [] {
    const char* const value = std::getenv("TESSERA_STRICT");
    return value && std::string(value) != "0" && *value != '\0';
  }();
  const bool* const is_strict = kStrict.find();
  return is_strict ? *is_strict : is_environment_strict;
}

void note_parameter(const std::shared_ptr<const DistParameter>& parameter) {
  if (last_parameter != parameter) last_parameter = parameter;
}

void refuse_without_rule(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  std::vector<std::string> tensors;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      const DistMeta* const meta = find_dist_meta(tensor);
      tensors.push_back(fmt::format("[{}] {}", fmt::join(tensor.sizes(), ", "),
                                    meta ? to_string(meta->spec->placements) : "ordinary"));
    });
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "[strict] ", op.schema().name(), " has no rule for DistTensors that fits this call",
                              place_of(arguments), "; it got ", fmt::format("{}", fmt::join(tensors, ", ")),
                              ". redistribute() its arguments, or leave the strict scope to compute it on whole tensors");
}

}  // namespace tessera
