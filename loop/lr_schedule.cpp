#include <c10/util/Exception.h>
#include <tessera/loop/lr_schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "engine/optim/param_state.h"

namespace tessera {
namespace {

// Falls from `from` to `to` as `part` rises from 0 to 1.
double cosine_between(double from, double to, double part) {
  return to + (from - to) / 2 * (1 + std::cos(std::numbers::pi * part));
}
double line_between(double from, double to, double part) { return from + (to - from) * part; }

using Between = double (*)(double from, double to, double part);

LRFactor warmup_then(const WarmupOptions& options, Between between) {
  TORCH_CHECK_VALUE(options.warmup >= 0 && options.steps > 0,
                    "[LambdaLR] warmup must be 0 or more, and steps positive; got ", options.warmup,
                    " and ", options.steps);
  return [options, between](int64_t step) {
    const auto [warmup, steps, last] = options;
    if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
    const double part = static_cast<double>(step - warmup) /
                        static_cast<double>(std::max<int64_t>(steps - 1 - warmup, 1));
    return between(1, last, std::min(part, 1.0));
  };
}

// Adds the rates of param groups that were added since.
void take_rates(const torch::optim::Optimizer& optimizer, std::vector<double>& rates) {
  for (size_t group = rates.size(); group < optimizer.param_groups().size(); ++group)
    rates.push_back(learning_rate(optimizer, group).value_or(0));
}

void set_rates(torch::optim::Optimizer& optimizer, const std::vector<double>& rates) {
  for (size_t group = 0; group < rates.size(); ++group)
    set_learning_rate(optimizer, group, rates[group]);
}

// Returns the name of the option that is the momentum; null if there is none.
const char* momentum_option(torch::optim::Optimizer& optimizer) {
  const auto options = read_options(optimizer, 0);
  return options.contains("beta1") ? "beta1" : options.contains("momentum") ? "momentum" : nullptr;
}

void check(const OneCycleOptions& options) {
  TORCH_CHECK_VALUE(options.steps > 0, "[OneCycleLR] options.steps must be positive; got ",
                    options.steps);
  const double most = options.three_phases ? 0.5 : 1;
  TORCH_CHECK_VALUE(options.warmup_fraction >= 0 && options.warmup_fraction <= most,
                    "[OneCycleLR] options.warmup_fraction must be 0 to ", most, "; got ",
                    options.warmup_fraction);
  TORCH_CHECK_VALUE(options.initial_divisor > 0 && options.final_divisor > 0,
                    "[OneCycleLR] divisors must be positive; got ", options.initial_divisor,
                    " and ", options.final_divisor);
}

}  // namespace

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, LRFactor factor)
    : LRScheduler(optimizer), optimizer_(optimizer), factor_(std::move(factor)) {
  TORCH_CHECK_VALUE(factor_, "[LambdaLR] factor must be a function; got none");
  set_rates(optimizer_, rates_of(0));
}

std::vector<double> LambdaLR::rates_of(int64_t step) {
  take_rates(optimizer_, initial_);
  std::vector<double> rates = initial_;
  for (double& rate : rates) rate *= factor_(step);
  return rates;
}

// Called before `step_count_` counts the step that has ended.
std::vector<double> LambdaLR::get_lrs() { return rates_of(int64_t{step_count_} + 1); }

LRFactor warmup_cosine(const WarmupOptions& options) {
  return warmup_then(options, cosine_between);
}

LRFactor warmup_linear(const WarmupOptions& options) { return warmup_then(options, line_between); }

LRFactor warmup_constant(int64_t warmup) {
  return warmup_then({.warmup = warmup, .steps = 1, .final_factor = 1}, line_between);
}

OneCycleLR::OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleOptions& options)
    : LRScheduler(optimizer), optimizer_(optimizer), options_(options) {
  check(options_);
  TORCH_CHECK_VALUE(
      !options_.cycle_momentum || momentum_option(optimizer_),
      "[OneCycleLR] the optimizer has no momentum to cycle; set options.cycle_momentum to false");
  set_rates(optimizer_, rates_of(0));
  set_momentum(0);
}

// Returns the value in a step of a quantity that goes from `first` to `most`, and then to `last`;
// with three phases by way of `first`.
double OneCycleLR::interpolate(int64_t step, double first, double most, double last) const {
  const auto steps = static_cast<double>(options_.steps), now = static_cast<double>(step);
  const double top = options_.warmup_fraction * steps - 1, end = steps - 1;
  const Between between = options_.linear ? line_between : cosine_between;
  const auto phase = [&](double begin, double until, double from, double to) {
    const double part = until > begin ? (now - begin) / (until - begin) : 1;
    return between(from, to, std::clamp(part, 0.0, 1.0));
  };
  if (now <= top) return phase(0, top, first, most);
  if (!options_.three_phases) return phase(top, end, most, last);
  const double back = 2 * options_.warmup_fraction * steps - 2;
  if (now <= back) return phase(top, back, most, first);
  return phase(back, end, first, last);
}

std::vector<double> OneCycleLR::rates_of(int64_t step) {
  take_rates(optimizer_, most_);
  std::vector<double> rates;
  for (const double most : most_) {
    const double first = most / options_.initial_divisor;
    rates.push_back(interpolate(step, first, most, first / options_.final_divisor));
  }
  return rates;
}

void OneCycleLR::set_momentum(int64_t step) {
  if (!options_.cycle_momentum) return;
  const double momentum =
      interpolate(step, options_.most_momentum, options_.least_momentum, options_.most_momentum);
  const std::map<std::string, double> option = {{momentum_option(optimizer_), momentum}};
  for (size_t group = 0; group < optimizer_.param_groups().size(); ++group)
    write_options(optimizer_, group, option);
}

std::vector<double> OneCycleLR::get_lrs() {
  const int64_t next = int64_t{step_count_} + 1;
  set_momentum(next);
  return rates_of(next);
}

}  // namespace tessera
