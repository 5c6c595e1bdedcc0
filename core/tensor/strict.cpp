#include "tensor/strict.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/tensor/dist_debug.h>
#include <tessera/tensor/dist_tensor.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/device/scoped_value.h"
#include "base/dispatch/each_tensor.h"
#include "tensor/redistribute.h"

namespace tessera {
namespace {

constexpr std::string_view kStrictName = "tessera strict operators";
const ScopedValue<bool> kStrict(&kStrictName, 201);
thread_local std::shared_ptr<const DistParameter> last_parameter;

// The dotted name of the module that has this parameter; empty for the root.
std::string name_of_module(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "" : parameter.substr(0, dot);
}

std::string module_of(const std::string& parameter) {
  const std::string name = name_of_module(parameter);
  return name.empty() ? "the root" : "'" + name + "'";
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

// An error if operators are strict, and a warning otherwise, of each text once.
void tell(const std::string& fact, const std::string& effect, const std::string& remedy) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_strict(), "[strict] ", fact, ". ", remedy);
  static std::mutex mutex;
  static auto* const told = new std::set<std::string>();
  const std::lock_guard lock(mutex);
  if (told->insert(fact).second)
    TORCH_WARN("[tessera] ", fact, ": ", effect, " (StrictOperators makes this an error)");
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

std::string last_module() { return last_parameter ? name_of_module(last_parameter->name) : ""; }

void tell_without_rule(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  std::vector<std::string> tensors;
  int64_t nbytes = 0;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      const DistMeta* const meta = find_dist_meta(tensor);
      tensors.push_back(fmt::format("[{}] {}", fmt::join(tensor.sizes(), ", "),
                                    meta ? to_string(meta->spec->placements) : "ordinary"));
      if (meta &&
          std::ranges::any_of(meta->spec->placements, [](const auto& p) { return is_shard(p); }))
        nbytes += static_cast<int64_t>(tensor.nbytes());
    });
  }
  tell(
      fmt::format("{} has no rule for DistTensors that fits this call{}; it got {}",
                  op.schema().name(), place_of(arguments), fmt::join(tensors, ", ")),
      fmt::format("every rank computes it on whole tensors, for which it gathers {} bytes", nbytes),
      "redistribute() its arguments, or leave the strict scope to compute it on whole tensors");
}

void tell_gather(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
                 const std::vector<DistSpecPtr>& wanted) {
  std::vector<std::string> moves;
  size_t input = 0;
  int64_t nbytes = 0;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      const Placements& to = wanted[input++]->placements;
      const DistMeta* const meta = find_dist_meta(tensor);
      if (!meta || !moves_shards(meta->spec->placements, to)) return;
      moves.push_back(fmt::format("a tensor of sizes [{}] from {} to {}",
                                  fmt::join(tensor.sizes(), ", "),
                                  to_string(meta->spec->placements), to_string(to)));
      nbytes += static_cast<int64_t>(tensor.nbytes());
    });
  }
  if (moves.empty()) return;
  tell(fmt::format("{} needs shards of other ranks{}: {}, {} bytes in all", op.schema().name(),
                   place_of(arguments), fmt::join(moves, ", and "), nbytes),
       "they are sent in every such call",
       "redistribute() it where it should be sent, or leave the strict scope");
}

}  // namespace tessera
