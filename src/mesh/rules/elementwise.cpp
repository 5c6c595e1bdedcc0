#include <functional>

#include "mesh/rules.h"

namespace tessera {
namespace {

// Operators whose output has, element by element, one value of each input, with broadcasting; and
// those that make a tensor like another one.

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

// Adds that sums pending in the inputs of `is_pending` alone stay so in the outputs.
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

// A copy keeps any reduction.
Strategies copying(const OpCall& call) {
  Strategies ways = pointwise(call);
  add_pending(ways, call);
  return ways;
}

Strategies linear_in_first(const OpCall& call) {
  Strategies ways = pointwise(call);
  add_sums(ways, call, [](size_t i) { return i == 0; });
  return ways;
}

// Linear in the first input alone, and in the second.
Strategies bilinear(const OpCall& call) {
  Strategies ways = linear_in_first(call);
  if (call.inputs.size() > 1) add_sums(ways, call, [](size_t i) { return i == 1; });
  return ways;
}

// `a + alpha * b` with a number for b: a term per rank would add it several times.
Strategies sum_of(const OpCall& call) {
  return call.inputs.size() < 2 ? pointwise(call) : linear(call);
}

struct Name {
  std::string_view name;
  Rule rule;
};

constexpr Name kNames[] = {
    {"add", sum_of},
    {"add_", sum_of},
    {"sub", sum_of},
    {"sub_", sum_of},
    {"neg", linear},
    {"neg_", linear},
    {"mul", bilinear},
    {"mul_", bilinear},
    {"div", linear_in_first},
    {"div_", linear_in_first},
    {"clone", copying},
    {"_to_copy", linear},
    {"copy_", copying},
    {"detach", copying},
    {"alias", copying},
    {"lift_fresh", copying},
    {"zero_", copying},
    {"fill_", pointwise},
    {"abs", pointwise},
    {"exp", pointwise},
    {"exp_", pointwise},
    {"log", pointwise},
    {"sqrt", pointwise},
    {"sqrt_", pointwise},
    {"rsqrt", pointwise},
    {"reciprocal", pointwise},
    {"sin", pointwise},
    {"cos", pointwise},
    {"tanh", pointwise},
    {"tanh_backward", pointwise},
    {"sigmoid", pointwise},
    {"sigmoid_backward", pointwise},
    {"relu", pointwise},
    {"relu_", pointwise},
    {"threshold_backward", pointwise},
    {"gelu", pointwise},
    {"gelu_backward", pointwise},
    {"silu", pointwise},
    {"silu_backward", pointwise},
    {"elu", pointwise},
    {"elu_backward", pointwise},
    {"leaky_relu", pointwise},
    {"leaky_relu_backward", pointwise},
    {"softplus", pointwise},
    {"softplus_backward", pointwise},
    {"hardtanh", pointwise},
    {"hardtanh_backward", pointwise},
    {"erf", pointwise},
    {"sign", pointwise},
    {"floor", pointwise},
    {"ceil", pointwise},
    {"round", pointwise},
    {"isnan", pointwise},
    {"pow", pointwise},
    {"pow_", pointwise},
    {"maximum", pointwise},
    {"minimum", pointwise},
    {"where", pointwise},
    {"masked_fill", pointwise},
    {"masked_fill_", pointwise},
    {"clamp", pointwise},
    {"clamp_", pointwise},
    {"clamp_min", pointwise},
    {"clamp_min_", pointwise},
    {"clamp_max", pointwise},
    {"lerp", pointwise},
    {"lerp_", pointwise},
    {"addcmul", pointwise},
    {"addcmul_", pointwise},
    {"addcdiv", pointwise},
    {"addcdiv_", pointwise},
    {"eq", pointwise},
    {"ne", pointwise},
    {"lt", pointwise},
    {"le", pointwise},
    {"gt", pointwise},
    {"ge", pointwise},
    {"logical_not", pointwise},
    {"logical_and", pointwise},
    {"logical_or", pointwise},
    {"bitwise_and", pointwise},
    {"bitwise_or", pointwise},
    {"bitwise_not", pointwise},
    {"logical_and_", pointwise},
    {"logical_or_", pointwise},
};

std::vector<TensorInfo> named_sizes(const OpCall& call) {
  return {{call.argument("size").toIntVector()}};
}

std::vector<RuleEntry> make_rules() {
  std::vector<RuleEntry> rules;
  for (const Name& entry : kNames) rules.push_back({entry.name, entry.rule, broadcast_sizes});
  for (const auto name : {"zeros_like", "ones_like", "full_like", "empty_like"})
    rules.push_back({.name = name, .rule = nullptr, .sizes = broadcast_sizes, .creates = true});
  for (const auto name : {"new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"})
    rules.push_back({name, nullptr, named_sizes, "size", /*creates=*/true});
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
  static const auto* const rules = new std::vector<RuleEntry>(make_rules());
  return *rules;
}

}  // namespace tessera
