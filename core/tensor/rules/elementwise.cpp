#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "tensor/rules.h"

namespace tessera {
namespace {

// Operators that compute each element of the output from one element of each input, with
// broadcasting; and operators that make a tensor like another one.

Strategies pointwise(const OpCall& call) {
  Strategies ways;
  if (call.outputs.empty()) return ways;
  const TensorInfo& output = call.outputs[0];
  for (int64_t dim = 0; dim < output.ndim(); ++dim)
    ways.push_back({inputs_under(call, dim, output), Placements(call.outputs.size(), Shard{dim})});
  return ways;
}

// Adds strategies: sums pending in exactly the inputs of `is_pending` stay pending in the outputs.
template <class F>
void add_sums_in(Strategies& ways, const OpCall& call, F is_pending) {
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
  add_sums(ways, call);
  return ways;
}

bool is_floating(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

// A copy keeps any reduction pending. One that rounds, or converts flags to numbers, does not:
// terms are not rounded as their sum is, and that may be far smaller. One to a wider type would
// make the message longer.
Strategies copied(const OpCall& call, c10::ScalarType from, c10::ScalarType to) {
  Strategies ways = pointwise(call);
  if (from == to) add_pending(ways, call);
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
  add_sums_in(ways, call, [](size_t i) { return i == 0; });
  return ways;
}

// Linear in the first input alone, and in the second alone.
Strategies bilinear(const OpCall& call) {
  Strategies ways = linear_in_first(call);
  if (call.inputs.size() > 1) add_sums_in(ways, call, [](size_t i) { return i == 1; });
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
  if (call.inputs.size() == 3) add_sums_in(ways, call, [](size_t i) { return i > 0; });
  return ways;
}

// The maximum of terms of two maxima is a term of the maximum of both; so for minima.
template <PartialOp op>
Strategies extremum(const OpCall& call) {
  Strategies ways = pointwise(call);
  ways.push_back({Placements(call.inputs.size(), Partial{op}), {Partial{op}}});
  return ways;
}

// In training, the operator draws numbers.
Strategies evaluated(const OpCall& call) {
  return call.argument("training").toBool() ? Strategies() : pointwise(call);
}

// Operators with one rule: each of the names with each of the endings. "_": the in-place form.
struct Family {
  Rule rule;
  std::vector<std::string> endings;
  std::vector<std::string> names;
};

const std::vector<Family>& families() {
  static const auto* const families = new std::vector<Family>{
      {sum_of, {"", "_"}, {"add", "sub", "rsub"}},
      {linear, {"", "_"}, {"neg", "conj_physical", "deg2rad", "rad2deg"}},
      {linear, {""}, {"_conj_physical"}},
      {bilinear, {"", "_"}, {"mul"}},
      {bilinear, {""}, {"native_dropout_backward"}},
      {evaluated, {"", "_backward"}, {"rrelu_with_noise"}},
      {quotient, {"", "_"}, {"div"}},
      {choice, {"", "_"}, {"where"}},
      {extremum<PartialOp::kMax>, {""}, {"maximum"}},
      {extremum<PartialOp::kMin>, {""}, {"minimum"}},
      {copying,
       {""},
       {"clone", "copy", "copy_", "detach", "detach_", "alias", "lift_fresh", "zero_"}},
      {casting, {""}, {"_to_copy"}},
      {pointwise, {"", "_"}, {"abs",         "acos",         "acosh",
                              "addcdiv",     "addcmul",      "asin",
                              "asinh",       "atan",         "atan2",
                              "atanh",       "bitwise_and",  "bitwise_left_shift",
                              "bitwise_not", "bitwise_or",   "bitwise_right_shift",
                              "bitwise_xor", "ceil",         "celu",
                              "clamp",       "clamp_max",    "clamp_min",
                              "copysign",    "cos",          "cosh",
                              "digamma",     "elu",          "eq",
                              "erf",         "erfc",         "erfinv",
                              "exp",         "exp2",         "expm1",
                              "floor",       "floor_divide", "fmod",
                              "frac",        "gcd",          "ge",
                              "gelu",        "gt",           "hardsigmoid",
                              "hardswish",   "hardtanh",     "heaviside",
                              "hypot",       "i0",           "igamma",
                              "igammac",     "lcm",          "ldexp",
                              "le",          "leaky_relu",   "lerp",
                              "lgamma",      "log",          "log10",
                              "log1p",       "log2",         "logical_and",
                              "logical_not", "logical_or",   "logical_xor",
                              "logit",       "lt",           "masked_fill",
                              "mish",        "mvlgamma",     "nan_to_num",
                              "ne",          "nextafter",    "polygamma",
                              "pow",         "reciprocal",   "relu",
                              "remainder",   "round",        "rsqrt",
                              "selu",        "sgn",          "sigmoid",
                              "sign",        "silu",         "sin",
                              "sinc",        "sinh",         "sqrt",
                              "square",      "tan",          "tanh",
                              "threshold",   "trunc",        "xlogy"}},
      {pointwise, {""}, {"__ilshift__", "__irshift__", "__lshift__", "__rshift__", "_prelu_kernel",
                         "angle",       "complex",     "fill_",      "fmax",       "fmin",
                         "hardshrink",  "isfinite",    "isinf",      "isnan",      "isneginf",
                         "isposinf",    "logaddexp",   "logaddexp2", "polar",      "signbit",
                         "softplus",    "softshrink"}},
      {pointwise,
       {""},
       {"special_airy_ai",
        "special_bessel_j0",
        "special_bessel_j1",
        "special_bessel_y0",
        "special_bessel_y1",
        "special_chebyshev_polynomial_t",
        "special_chebyshev_polynomial_u",
        "special_chebyshev_polynomial_v",
        "special_chebyshev_polynomial_w",
        "special_entr",
        "special_erfcx",
        "special_hermite_polynomial_h",
        "special_hermite_polynomial_he",
        "special_i0e",
        "special_i1",
        "special_i1e",
        "special_laguerre_polynomial_l",
        "special_legendre_polynomial_p",
        "special_log_ndtr",
        "special_modified_bessel_i0",
        "special_modified_bessel_i1",
        "special_modified_bessel_k0",
        "special_modified_bessel_k1",
        "special_ndtri",
        "special_scaled_modified_bessel_k0",
        "special_scaled_modified_bessel_k1",
        "special_shifted_chebyshev_polynomial_t",
        "special_shifted_chebyshev_polynomial_u",
        "special_shifted_chebyshev_polynomial_v",
        "special_shifted_chebyshev_polynomial_w",
        "special_spherical_bessel_j0",
        "special_xlog1py",
        "special_zeta"}},
      {pointwise,
       {"_backward"},
       {"elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
        "log_sigmoid", "logit", "mish", "sigmoid", "silu", "softplus", "softshrink", "tanh",
        "threshold"}},
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

std::vector<RuleEntry> make_elementwise_rules() {
  // The names live as long as the program, at the same addresses.
  static auto* const names = new std::deque<std::string>();
  std::vector<RuleEntry> rules;
  for (const Family& family : families()) {
    for (const std::string& name : family.names) {
      for (const std::string& ending : family.endings)
        rules.push_back({names->emplace_back(name + ending), family.rule, broadcast_sizes});
    }
  }
  for (const auto name : {"log_sigmoid_forward", "_prelu_kernel_backward", "frexp"})
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
