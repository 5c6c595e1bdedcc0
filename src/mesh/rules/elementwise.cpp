#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "mesh/rules.h"

namespace tessera {
namespace {

// Operators that compute each element of the output from one element of each input, with
// broadcasting; and operators that make a tensor like another one.

Strategies pointwise(const OpCall& call) {
  Strategies ways;
  if (call.outputs.empty()) return ways;
  const TensorInfo& output = call.outputs[0];
  for (int64_t dim = 0; dim < output.ndim(); ++dim) {
    Strategy way;
    for (const TensorInfo& input : call.inputs)
      way.inputs.push_back(placed_under(input, dim, output));
    way.outputs.assign(call.outputs.size(), Shard{dim});
    ways.push_back(std::move(way));
  }
  return ways;
}

// Adds strategies: sums pending in exactly the inputs of `is_pending` stay pending in the outputs.
void add_sums(Strategies& ways, const OpCall& call, const std::function<bool(size_t)>& is_pending) {
  for (const PartialOp op : {PartialOp::kSum, PartialOp::kAvg}) {
    Strategy way{Placements(call.inputs.size(), Replicate{}),
                 Placements(call.outputs.size(), Partial{op})};
    for (size_t i = 0; i < way.inputs.size(); ++i) {
      if (is_pending(i)) way.inputs[i] = Partial{op};
    }
    ways.push_back(std::move(way));
  }
}

// f(a + b) = f(a) + f(b), in all inputs together: additions, negation.
Strategies linear(const OpCall& call) {
  Strategies ways = pointwise(call);
  add_sums(ways, call, [](size_t) { return true; });
  return ways;
}

bool is_floating(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

// A copy keeps any reduction pending. One that rounds to whole numbers, or converts flags to
// numbers, does not: terms are not rounded as their sum is.
Strategies copied(const OpCall& call, c10::ScalarType from, c10::ScalarType to) {
  Strategies ways = pointwise(call);
  if (from == to || (c10::isFloatingType(from) && c10::isFloatingType(to))) add_pending(ways, call);
  return ways;
}

Strategies copying(const OpCall& call) {
  return copied(call, call.inputs[0].dtype, call.inputs.back().dtype);
}

Strategies casting(const OpCall& call) {
  const c10::ScalarType from = call.inputs[0].dtype;
  const c10::IValue& to = call.argument("dtype");
  return copied(call, from, to.isNone() ? from : to.toScalarType());
}

Strategies linear_in_first(const OpCall& call) {
  Strategies ways = pointwise(call);
  add_sums(ways, call, [](size_t i) { return i == 0; });
  return ways;
}

// Linear in the first input alone, and in the second alone.
Strategies bilinear(const OpCall& call) {
  Strategies ways = linear_in_first(call);
  if (call.inputs.size() > 1) add_sums(ways, call, [](size_t i) { return i == 1; });
  return ways;
}

// Linear in the first, unless the quotient is rounded.
Strategies quotient(const OpCall& call) {
  const c10::IValue* const rounding = call.find("rounding_mode");
  return rounding && !rounding->isNone() ? pointwise(call) : linear_in_first(call);
}

// `a + alpha * b`. If b is a number, adding it to each rank's term would add it several times; an
// average of the terms has it once.
Strategies sum_of(const OpCall& call) {
  if (call.inputs.size() > 1) return linear(call);
  Strategies ways = pointwise(call);
  if (is_floating(call.inputs[0].dtype))
    ways.push_back({{Partial{PartialOp::kAvg}}, {Partial{PartialOp::kAvg}}});
  return ways;
}

// Linear in the inputs chosen from, not in the condition.
Strategies choice(const OpCall& call) {
  Strategies ways = pointwise(call);
  if (call.inputs.size() == 3) add_sums(ways, call, [](size_t i) { return i > 0; });
  return ways;
}

struct Family {
  Rule rule;
  std::vector<std::string_view> names;
};

// Operators that also have an in-place form, named with a "_".
const std::vector<Family>& families() {
  static const auto* const families = new std::vector<Family>{
      {sum_of, {"add", "sub", "rsub"}},
      {linear, {"neg"}},
      {bilinear, {"mul"}},
      {quotient, {"div"}},
      {choice, {"where"}},
      {pointwise,
       {"abs",        "acos",         "acosh",       "addcdiv",    "addcmul",     "asin",
        "asinh",      "atan",         "atan2",       "atanh",      "bitwise_and", "bitwise_not",
        "bitwise_or", "bitwise_xor",  "ceil",        "celu",       "clamp",       "clamp_max",
        "clamp_min",  "copysign",     "cos",         "cosh",       "elu",         "eq",
        "erf",        "erfc",         "erfinv",      "exp",        "exp2",        "expm1",
        "floor",      "floor_divide", "fmod",        "frac",       "ge",          "gelu",
        "gt",         "hardsigmoid",  "hardswish",   "hardtanh",   "hypot",       "le",
        "leaky_relu", "lerp",         "lgamma",      "log",        "log10",       "log1p",
        "log2",       "logical_and",  "logical_not", "logical_or", "logical_xor", "logit",
        "lt",         "masked_fill",  "mish",        "nan_to_num", "ne",          "pow",
        "reciprocal", "relu",         "remainder",   "round",      "rsqrt",       "selu",
        "sgn",        "sigmoid",      "sign",        "silu",       "sin",         "sinc",
        "sinh",       "sqrt",         "square",      "tan",        "tanh",        "threshold",
        "trunc",      "xlogy"}},
  };
  return *families;
}

const std::vector<Family>& copies() {
  static const auto* const families = new std::vector<Family>{
      {copying, {"clone", "copy_", "detach", "alias", "lift_fresh", "zero_"}},
      {casting, {"_to_copy"}},
  };
  return *families;
}

// Other operators, without an in-place form.
const std::vector<Family>& plain_families() {
  static const auto* const families = new std::vector<Family>{
      {pointwise,
       {"_prelu_kernel",
        "elu_backward",
        "fill_",
        "fmax",
        "fmin",
        "gelu_backward",
        "hardshrink",
        "hardshrink_backward",
        "hardsigmoid_backward",
        "hardswish_backward",
        "hardtanh_backward",
        "heaviside",
        "isfinite",
        "isinf",
        "isnan",
        "isneginf",
        "isposinf",
        "leaky_relu_backward",
        "log_sigmoid_backward",
        "logaddexp",
        "logaddexp2",
        "logit_backward",
        "maximum",
        "minimum",
        "mish_backward",
        "sigmoid_backward",
        "signbit",
        "silu_backward",
        "softplus",
        "softplus_backward",
        "softshrink",
        "softshrink_backward",
        "tanh_backward",
        "threshold_backward"}},
  };
  return *families;
}

std::vector<TensorInfo> named_sizes(const OpCall& call) {
  return {{call.argument("size").toIntVector()}};
}

std::vector<TensorInfo> two_broadcast_sizes(const OpCall& call) {
  const TensorInfo output = broadcast_sizes(call)[0];
  return {output, output};
}

// Names live as long as the program.
std::string_view in_place(std::string_view name) {
  return *new std::string(std::string(name) + "_");
}

std::vector<RuleEntry> make_elementwise_rules() {
  std::vector<RuleEntry> rules;
  for (const Family& family : families()) {
    for (const auto name : family.names) {
      rules.push_back({name, family.rule, broadcast_sizes});
      rules.push_back({in_place(name), family.rule, broadcast_sizes});
    }
  }
  for (const auto* const plain : {&copies(), &plain_families()}) {
    for (const Family& family : *plain) {
      for (const auto name : family.names) rules.push_back({name, family.rule, broadcast_sizes});
    }
  }
  for (const auto name : {"log_sigmoid_forward", "_prelu_kernel_backward"})
    rules.push_back({name, pointwise, two_broadcast_sizes});
  for (const auto name : {"zeros_like", "ones_like", "full_like", "empty_like"})
    rules.push_back({.name = name, .rule = nullptr, .sizes = broadcast_sizes, .creates = true});
  for (const auto name : {"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"})
    rules.push_back({name, nullptr, named_sizes, "size", /*creates=*/true});
  for (RuleEntry& rule : rules) rule.splits = true;
  return rules;
}

}  // namespace

std::vector<TensorInfo> broadcast_sizes(const OpCall& call) {
  TensorInfo output;
  for (const TensorInfo& input : call.inputs) {
    if (input.ndim() > output.ndim())
      output.sizes.insert(output.sizes.begin(), input.ndim() - output.ndim(), 1);
    for (int64_t d = 0; d < input.ndim(); ++d) {
      int64_t& size = output.sizes[d + output.ndim() - input.ndim()];
      if (size == 1) size = input.sizes[d];
    }
  }
  return {output};
}

std::span<const RuleEntry> elementwise_rules() {
  static const auto* const rules = new std::vector<RuleEntry>(make_elementwise_rules());
  return *rules;
}

}  // namespace tessera
