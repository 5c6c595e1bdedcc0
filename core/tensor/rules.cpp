#include "tensor/rules.h"

#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

namespace tessera {
namespace {

Strategy all_pending(const OpCall& call, PartialOp op) {
  return {Placements(call.inputs.size(), Partial{op}),
          Placements(call.outputs.size(), Partial{op})};
}

}  // namespace

const c10::IValue* NamedArguments::find(std::string_view name) const {
  for (size_t i = 0; i < values.size(); ++i) {
    if (schema.arguments()[i].name() == name) return &values[i];
  }
  return nullptr;
}

const c10::IValue& NamedArguments::argument(std::string_view name) const {
  const c10::IValue* const value = find(name);
  TORCH_INTERNAL_ASSERT(value, schema.name(), " has no argument ", std::string(name));
  return *value;
}

int OpCall::input(std::string_view name) const {
  const c10::IValue& value = argument(name);
  return value.isTensor() && value.toTensor().defined() ? first_input[&value - values.data()] : -1;
}

int64_t OpCall::dim(std::string_view name, int64_t ndim) const {
  return c10::maybe_wrap_dim(argument(name).toInt(), ndim);
}

Placement placed_under(const TensorInfo& input, int64_t dim, const TensorInfo& output) {
  const int64_t own = dim - (output.ndim() - input.ndim());
  if (own < 0 || input.sizes[own] != output.sizes[dim]) return Replicate{};
  return Shard{own};
}

Placements inputs_under(const OpCall& call, int64_t dim, const TensorInfo& output) {
  Placements placements;
  for (const TensorInfo& input : call.inputs)
    placements.push_back(placed_under(input, dim, output));
  return placements;
}

Placements first_placed(const OpCall& call, const Placement& placement) {
  Placements placements(call.inputs.size(), Replicate{});
  placements[0] = placement;
  return placements;
}

Strategy all_cut(const OpCall& call, int64_t dim) {
  return {Placements(call.inputs.size(), Shard{dim}), Placements(call.outputs.size(), Shard{dim})};
}

Placements placed_by_name(const OpCall& call,
                          const std::vector<std::pair<std::string_view, Placement>>& given) {
  Placements placements(call.inputs.size(), Replicate{});
  for (const auto& [name, placement] : given) {
    const int input = call.find(name) ? call.input(name) : -1;
    if (input >= 0) placements[input] = placement;
  }
  return placements;
}

Strategies along_other_dims(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim(), dim = call.dim("dim", ndim);
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) {
    const auto has_it = [&](const TensorInfo& input) {
      return input.ndim() == ndim && input.sizes[d] == call.inputs[0].sizes[d];
    };
    if (d != dim && std::ranges::all_of(call.inputs, has_it)) ways.push_back(all_cut(call, d));
  }
  return ways;
}

Strategies before_spatial(const OpCall& call, int64_t spatial) {
  Strategies ways;
  const TensorInfo& self = call.inputs[call.input("self")];
  for (int64_t d = 0; d < self.ndim() - spatial; ++d) {
    if (call.reaches_all(self.sizes[d])) ways.push_back(all_cut(call, d));
  }
  return ways;
}

int64_t stretched(const OpCall& call, std::string_view name, size_t dim) {
  const auto values = call.argument(name).toIntVector();
  return values[values.size() == 1 ? 0 : dim];
}

std::vector<TensorInfo> surrounded_sizes(const OpCall& call, std::string_view padding) {
  TensorInfo output = call.inputs[0];
  const auto pad = call.argument(padding).toIntVector();
  for (size_t i = 0; i < pad.size(); ++i) output.sizes[output.ndim() - 1 - i / 2] += pad[i];
  return {output};
}

std::vector<int64_t> named_dims(const c10::IValue* dim, int64_t ndim, bool empty_is_all) {
  const bool is_empty = dim && dim->isIntList() && dim->toIntVector().empty();
  const bool is_given = dim && !dim->isNone() && !(is_empty && empty_is_all);
  std::vector<bool> named(ndim, !is_given);
  if (is_given && ndim > 0) {
    const auto dims = dim->isInt() ? std::vector<int64_t>{dim->toInt()} : dim->toIntVector();
    for (const int64_t d : dims) named[c10::maybe_wrap_dim(d, ndim)] = true;
  }
  std::vector<int64_t> result;
  for (int64_t d = 0; d < ndim; ++d) {
    if (named[d]) result.push_back(d);
  }
  return result;
}

std::vector<TensorInfo> like_first(const OpCall& call) { return {call.inputs[0]}; }
std::vector<TensorInfo> like_second(const OpCall& call) { return {call.inputs[1]}; }

std::vector<TensorInfo> like_self(const OpCall& call) { return {call.inputs[call.input("self")]}; }

void add_sums(Strategies& ways, const OpCall& call) {
  for (const auto op : {PartialOp::kSum, PartialOp::kAvg}) ways.push_back(all_pending(call, op));
}

void add_pending(Strategies& ways, const OpCall& call) {
  add_sums(ways, call);
  const bool is_complex = std::ranges::any_of(call.outputs, [](const TensorInfo& output) {
    return c10::isComplexType(output.dtype);  // such numbers have no order
  });
  for (const auto op : {PartialOp::kMax, PartialOp::kMin, PartialOp::kProd, PartialOp::kAny,
                        PartialOp::kAll, PartialOp::kNorm})
    if (!is_complex || op == PartialOp::kProd) ways.push_back(all_pending(call, op));
}

namespace {

// Rules of users. Few threads write, before others read.
struct AddedRules {
  std::shared_mutex mutex;
  std::map<std::string, RuleEntry> rules;  // by the name with its namespace
  std::deque<std::string> names;           // the entries refer to them
};
AddedRules& added_rules() {
  static auto* const added = new AddedRules();
  return *added;
}

const RuleEntry* find_added_rule(const std::string& name) {
  AddedRules& added = added_rules();
  const std::shared_lock lock(added.mutex);
  const auto found = added.rules.find(name);
  return found == added.rules.end() ? nullptr : &found->second;
}

}  // namespace

void add_rule(const std::string& name, Rule rule, const RuleOptions& options) {
  AddedRules& added = added_rules();
  const std::unique_lock lock(added.mutex);
  RuleEntry entry{.name = added.names.emplace_back(name), .rule = rule, .sizes = options.sizes};
  entry.size_argument = added.names.emplace_back(options.size_argument);
  entry.splits = options.splits;
  added.rules.emplace(name, entry);
}

const RuleEntry* find_rule(const c10::FunctionSchema& schema) {
  if (const RuleEntry* const added = find_added_rule(schema.name())) return added;
  if (!schema.name().starts_with("aten::")) return nullptr;
  static const auto* const rules = [] {
    auto* const map = new std::unordered_map<std::string_view, const RuleEntry*>();
    for (const auto family :
         {elementwise_rules(), matrix_rules(), view_rules(), indexing_rules(), reduction_rules(),
          model_rules(), normalization_rules(), convolution_rules(), loss_rules(),
          attention_rules(), spatial_rules(), linear_algebra_rules()}) {
      for (const RuleEntry& entry : family) map->emplace(entry.name, &entry);
    }
    return map;
  }();
  const std::string_view name = std::string_view(schema.name()).substr(6);  // aten::
  if (!schema.overload_name().empty()) {
    const auto found = rules->find(std::string(name) + "." + schema.overload_name());
    if (found != rules->end()) return found->second;
  }
  const auto found = rules->find(name);
  return found == rules->end() ? nullptr : found->second;
}

}  // namespace tessera
