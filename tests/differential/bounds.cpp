#include "differential/bounds.h"

#include <cmath>

namespace tessera::differential {
namespace {

using torch::Tensor;

constexpr double kRoundings = 4;

// The arithmetic of a step in a dtype.
struct Arithmetic {
  double unit;   // roundoff
  double least;  // positive number, below which roundings are absolute

  Approximate rounded(const Tensor& value, const Tensor& error) const {
    return {value, error + kRoundings * (unit * (value.abs() + error) + least)};
  }
  Approximate add(const Approximate& a, const Approximate& b) const {
    return rounded(a.value + b.value, a.error + b.error);
  }
  Approximate times(const Approximate& a, double factor) const {
    return rounded(a.value * factor, a.error * std::abs(factor));
  }
  Approximate multiply(const Approximate& a, const Approximate& b) const {
    return rounded(a.value * b.value,
                   a.error * b.value.abs() + b.error * a.value.abs() + a.error * b.error);
  }
  // `b` is positive. Where it may be zero, nothing is known: of 16 bits, an epsilon may be zero.
  Approximate divide(const Approximate& a, const Approximate& b) const {
    const Tensor least_b = b.value - b.error, quotient = a.value / b.value;
    Approximate result =
        rounded(quotient, (a.error + quotient.abs() * b.error) / least_b.clamp_min(1e-300));
    result.error = result.error.masked_fill(least_b.le(0), INFINITY);
    return result;
  }
  // In either order, which matters for numbers with few bits.
  Approximate ratio(const Approximate& a, const Approximate& b, double factor) const {
    Approximate result = times(divide(a, b), factor);
    result.error = torch::maximum(result.error, divide(times(a, factor), b).error);
    return result;
  }
  Approximate root(const Approximate& a) const {
    const Tensor root = a.value.sqrt();
    return rounded(root, (a.value + a.error).sqrt() - (a.value - a.error).clamp_min(0).sqrt());
  }
  // Vector instructions may leave a number where the other is none.
  Approximate most(const Approximate& a, const Approximate& b) const {
    const Tensor value = torch::maximum(a.value, b.value);
    return {value, torch::maximum(a.error, b.error).masked_fill(value.isnan(), INFINITY)};
  }
};

Arithmetic arithmetic_of(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return {0x1p-8, 0x1p-133};
  if (dtype == at::kHalf) return {0x1p-11, 0x1p-24};
  return dtype == at::kDouble ? Arithmetic{0x1p-53, 0} : Arithmetic{0x1p-24, 0x1p-149};
}

// Kernels leave weight decay out where it is zero, also of a parameter that is no number.
Approximate decayed(const Arithmetic& of, const Optimizer& spec, const StepState& state) {
  const Approximate grad = exact(state.grad);
  return spec.decay == 0 ? grad : of.add(grad, of.times(exact(state.param), spec.decay));
}

StepResult step_sgd(const Arithmetic& of, const Optimizer& spec, double lr,
                    const StepState& state) {
  StepResult result;
  Approximate grad = decayed(of, spec, state);
  if (spec.momentum > 0) {
    // The first step copies the gradient.
    result.first =
        state.first.defined() ? of.add(of.times(exact(state.first), spec.momentum), grad) : grad;
    grad = spec.flag ? of.add(grad, of.times(result.first, spec.momentum)) : result.first;
  }
  result.param = of.add(exact(state.param), of.times(grad, -lr));
  return result;
}

StepResult step_adagrad(const Arithmetic& of, const Optimizer& spec, double lr,
                        const StepState& state) {
  StepResult result;
  const Approximate grad = decayed(of, spec, state);
  result.second = of.add(exact(state.second), of.multiply(grad, grad));
  const double rate = lr / (1 + state.step * spec.momentum);
  const Approximate divisor =
      of.add(of.root(result.second), exact(torch::full_like(grad.value, spec.eps)));
  result.param = of.add(exact(state.param), of.ratio(grad, divisor, -rate));
  return result;
}

StepResult step_adam(const Arithmetic& of, const Optimizer& spec, double lr,
                     const StepState& state) {
  StepResult result;
  const auto or_zeros = [&](const Tensor& tensor) {
    return exact(tensor.defined() ? tensor : torch::zeros_like(state.param));
  };
  const bool is_adamw = spec.kind == "AdamW";
  const Approximate grad = is_adamw ? exact(state.grad) : decayed(of, spec, state);
  Approximate param = exact(state.param);
  if (is_adamw) param = of.times(param, 1 - lr * spec.decay);
  const double step = state.step + 1;
  result.first =
      of.add(of.times(or_zeros(state.first), spec.momentum), of.times(grad, 1 - spec.momentum));
  result.second = of.add(of.times(or_zeros(state.second), spec.beta2),
                         of.times(of.multiply(grad, grad), 1 - spec.beta2));
  Approximate squares = result.second;
  if (spec.flag) squares = result.most = of.most(or_zeros(state.most), squares);
  const Approximate divisor =
      of.add(of.times(of.root(squares), 1 / std::sqrt(1 - std::pow(spec.beta2, step))),
             exact(torch::full_like(param.value, spec.eps)));
  const double rate = lr / (1 - std::pow(spec.momentum, step));
  result.param = of.add(param, of.ratio(result.first, divisor, -rate));
  return result;
}

}  // namespace

Approximate exact(const Tensor& value) {
  const Tensor wide = value.detach().to(torch::kDouble);
  return {wide, torch::zeros_like(wide)};
}

StepResult step_approximately(const Optimizer& spec, double lr, const StepState& state) {
  const Arithmetic of = arithmetic_of(state.param.scalar_type());
  if (spec.kind == "SGD") return step_sgd(of, spec, lr, state);
  return spec.kind == "Adagrad" ? step_adagrad(of, spec, lr, state)
                                : step_adam(of, spec, lr, state);
}

double norm_bound(double sum, double type, int64_t most, int64_t all) {
  if (!std::isfinite(sum) || std::isinf(type)) return 0;
  if (sum > 0x1p127) return INFINITY;
  // The exponent 1 / type is rounded, too.
  const double roundings =
      (static_cast<double>(most) + std::abs(std::log(std::max(sum, 0x1p-149)))) / type + 5;
  return std::pow(sum, 1 / type) * roundings * 0x1p-24 +
         std::pow(static_cast<double>(all) * 0x1p-126, 1 / type);
}

}  // namespace tessera::differential
