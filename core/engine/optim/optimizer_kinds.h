#pragma once

#include <tessera/engine/cpu_adam.h>
#include <tessera/engine/muon.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "engine/optim/cpu_adam_step.h"
#include "engine/optim/described_optimizer.h"
#include "engine/optim/param_state.h"

namespace tessera {

/// The optimizers whose state and options Tessera reads and writes: the only table of them, but for
/// those that users describe. A kind has the names of its class, options and per-parameter state,
/// and
///
/// - `visit_state(state, tensor, count)`: calls `tensor` or `count` with the name of each field of
///   the state and a reference to it;
/// - `visit_options(options, f)`: calls `f` with the name of each option and a reference to its
///   double, int64_t, bool or dtype; `betas` is `beta1` and `beta2`;
/// - `state_names(options)`: the names of the tensors that the optimizer keeps with these options;
/// - `make_state()`: a state object without tensors;
/// - `is_exactly(optimizer)`: whether the optimizer is of its class, and not of a derived one;
/// - `starts_with_zeros(options)`: whether the first step makes state of zeros;
/// - `steps_elementwise(options)`: whether a step treats each element by itself;
/// - `state_dtype(options, param)`: the dtype of the state of parameters of dtype `param`, but for
///   scales, which are Float.
///
/// Names are those of LibTorch and PyTorch.
template <class OptimizerClass, class OptionsClass, class StateClass>
struct OptimizerKind {
  using Optimizer = OptimizerClass;
  using Options = OptionsClass;
  using State = StateClass;
  static std::unique_ptr<State> make_state() { return std::make_unique<State>(); }
  static bool is_exactly(const torch::optim::Optimizer& optimizer) {
    return typeid(optimizer) == typeid(OptimizerClass);
  }
  static bool starts_with_zeros(Options& /*options*/) { return true; }
  static bool steps_elementwise(const Options& /*options*/) { return true; }
  static at::ScalarType state_dtype(const Options& /*options*/, at::ScalarType param) {
    return param;
  }
};

template <class OptimizerClass, class OptionsClass, class StateClass>
struct AdamKinds : OptimizerKind<OptimizerClass, OptionsClass, StateClass> {
  template <class Tensor, class Count>
  static void visit_state(StateClass& state, Tensor&& tensor, Count&& count) {
    tensor("exp_avg", state.exp_avg());
    tensor("exp_avg_sq", state.exp_avg_sq());
    tensor("max_exp_avg_sq", state.max_exp_avg_sq());
    count("step", state.step());
  }
  template <class F>
  static void visit_options(OptionsClass& options, F&& f) {
    f("lr", options.lr());
    f("beta1", std::get<0>(options.betas()));
    f("beta2", std::get<1>(options.betas()));
    f("eps", options.eps());
    f("weight_decay", options.weight_decay());
    f("amsgrad", options.amsgrad());
  }
  static std::vector<std::string> state_names(OptionsClass& options) {
    if (options.amsgrad()) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {"exp_avg", "exp_avg_sq"};
  }
};

struct AdamWKind
    : AdamKinds<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState> {
  static constexpr const char* kName = "AdamW";
};

struct AdamKind
    : AdamKinds<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState> {
  static constexpr const char* kName = "Adam";
};

struct CPUAdamKind : OptimizerKind<CPUAdam, CPUAdamOptions, CPUAdamParamState> {
  static constexpr const char* kName = "CPUAdam";
  template <class Tensor, class Count>
  static void visit_state(State& state, Tensor&& tensor, Count&& count) {
    tensor("exp_avg", state.exp_avg());
    tensor("exp_avg_sq", state.exp_avg_sq());
    tensor("exp_avg_scale", state.exp_avg_scale());
    tensor("exp_avg_sq_scale", state.exp_avg_sq_scale());
    count("step", state.step());
  }
  template <class F>
  static void visit_options(Options& options, F&& f) {
    f("lr", options.lr());
    f("bias_correction", options.bias_correction());
    f("beta1", std::get<0>(options.betas()));
    f("beta2", std::get<1>(options.betas()));
    f("eps", options.eps());
    f("weight_decay", options.weight_decay());
    f("adamw_mode", options.adamw_mode());
    f(kStateDtype, options.state_dtype());
    f("seed", options.seed());
  }
  static std::vector<std::string> state_names(Options& options) {
    if (options.state_dtype() != at::kByte) return {"exp_avg", "exp_avg_sq"};
    return {"exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"};
  }
  static at::ScalarType state_dtype(const Options& options, at::ScalarType param) {
    return moment_dtype(param, options.state_dtype());
  }
};

struct SGDKind
    : OptimizerKind<torch::optim::SGD, torch::optim::SGDOptions, torch::optim::SGDParamState> {
  static constexpr const char* kName = "SGD";
  template <class Tensor, class Count>
  static void visit_state(State& state, Tensor&& tensor, Count&& /*count*/) {
    tensor("momentum_buffer", state.momentum_buffer());
  }
  template <class F>
  static void visit_options(Options& options, F&& f) {
    f("lr", options.lr());
    f("momentum", options.momentum());
    f("dampening", options.dampening());
    f("weight_decay", options.weight_decay());
    f("nesterov", options.nesterov());
  }
  static std::vector<std::string> state_names(Options& options) {
    if (options.momentum() == 0) return {};
    return {"momentum_buffer"};
  }
  /// With dampening, the first gradient becomes the buffer unchanged.
  static bool starts_with_zeros(Options& options) { return options.dampening() == 0; }
};

struct AdagradKind : OptimizerKind<torch::optim::Adagrad, torch::optim::AdagradOptions,
                                   torch::optim::AdagradParamState> {
  static constexpr const char* kName = "Adagrad";
  template <class Tensor, class Count>
  static void visit_state(State& state, Tensor&& tensor, Count&& count) {
    tensor("sum", state.sum());
    count("step", state.step());
  }
  template <class F>
  static void visit_options(Options& options, F&& f) {
    f("lr", options.lr());
    f("lr_decay", options.lr_decay());
    f("weight_decay", options.weight_decay());
    f("initial_accumulator_value", options.initial_accumulator_value());
    f("eps", options.eps());
  }
  static std::vector<std::string> state_names(Options& /*options*/) { return {"sum"}; }
};

struct RMSpropKind : OptimizerKind<torch::optim::RMSprop, torch::optim::RMSpropOptions,
                                   torch::optim::RMSpropParamState> {
  static constexpr const char* kName = "RMSprop";
  template <class Tensor, class Count>
  static void visit_state(State& state, Tensor&& tensor, Count&& count) {
    tensor("square_avg", state.square_avg());
    tensor("momentum_buffer", state.momentum_buffer());
    tensor("grad_avg", state.grad_avg());
    count("step", state.step());
  }
  template <class F>
  static void visit_options(Options& options, F&& f) {
    f("lr", options.lr());
    f("alpha", options.alpha());
    f("eps", options.eps());
    f("weight_decay", options.weight_decay());
    f("momentum", options.momentum());
    f("centered", options.centered());
  }
  static std::vector<std::string> state_names(Options& options) {
    std::vector<std::string> names{"square_avg"};
    if (options.momentum() > 0) names.emplace_back("momentum_buffer");
    if (options.centered()) names.emplace_back("grad_avg");
    return names;
  }
};

struct MuonKind : OptimizerKind<Muon, MuonOptions, MuonParamState> {
  static constexpr const char* kName = "Muon";
  template <class Tensor, class Count>
  static void visit_state(State& state, Tensor&& tensor, Count&& count) {
    tensor("momentum_buffer", state.momentum_buffer());
    tensor("exp_avg", state.exp_avg());
    tensor("exp_avg_sq", state.exp_avg_sq());
    count("step", state.step());
  }
  template <class F>
  static void visit_options(Options& options, F&& f) {
    f("lr", options.lr());
    f("weight_decay", options.weight_decay());
    f("momentum", options.momentum());
    f("nesterov", options.nesterov());
    f("ns_a", std::get<0>(options.ns_coefficients()));
    f("ns_b", std::get<1>(options.ns_coefficients()));
    f("ns_c", std::get<2>(options.ns_coefficients()));
    f("eps", options.eps());
    f("ns_steps", options.ns_steps());
    f("match_rms_adamw", options.match_rms_adamw());
    f("adamw", options.adamw());
    f("beta1", std::get<0>(options.betas()));
    f("beta2", std::get<1>(options.betas()));
    f("adamw_eps", options.adamw_eps());
  }
  static std::vector<std::string> state_names(Options& options) {
    if (options.adamw()) return {"exp_avg", "exp_avg_sq"};
    return {"momentum_buffer"};
  }
  static bool steps_elementwise(const Options& options) { return options.adamw(); }
  static at::ScalarType state_dtype(const Options& /*options*/, at::ScalarType param) {
    return moment_dtype(param);
  }
};

using OptimizerKinds =
    std::tuple<AdamWKind, AdamKind, CPUAdamKind, SGDKind, AdagradKind, RMSpropKind, MuonKind>;

/// A class that its user has described. The state that it makes is not known in advance, but for
/// the names of its fields.
struct DescribedKind {
  using Options = torch::optim::OptimizerOptions;
  using State = torch::optim::OptimizerParamState;
  const detail::DescribedOptimizer* traits;
  const char* kName;

  std::unique_ptr<State> make_state() const { return traits->make_state(); }
  bool is_exactly(const torch::optim::Optimizer& optimizer) const {
    return typeid(optimizer) == *traits->type;
  }
  template <class Tensor, class Count>
  void visit_state(State& state, Tensor&& tensor, Count&& count) const {
    const OptimizerStateFields fields = traits->state(state);
    for (const auto* const tensors : {&fields.tensors, &fields.others})
      for (const auto& [name, value] : *tensors) tensor(name.c_str(), *value);
    for (const auto& [name, value] : fields.counts) count(name.c_str(), *value);
  }
  template <class F>
  void visit_options(Options& options, F&& f) const {
    for (const auto& [name, value] : traits->options(options))
      std::visit([&, &name = name](auto* option) { f(name.c_str(), *option); }, value);
  }
  std::vector<std::string> state_names(Options& /*options*/) const {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : traits->state(*make_state()).tensors) names.push_back(name);
    return names;
  }
  static bool starts_with_zeros(Options& /*options*/) { return false; }
  bool steps_elementwise(const Options& /*options*/) const { return traits->cut == Cut::kAnywhere; }
  static at::ScalarType state_dtype(const Options& /*options*/, at::ScalarType param) {
    return param;
  }
};

/// Calls `f` with the first kind of the table that `is_it(kind)` accepts; returns false if there is
/// none.
template <class IsIt, class F>
bool with_fixed_kind_if(const IsIt& is_it, F&& f) {
  const auto try_kind = [&](auto kind) { return is_it(kind) && (f(kind), true); };
  return std::apply([&](auto... kinds) { return (try_kind(kinds) || ...); }, OptimizerKinds());
}

/// Calls `f` with the kind of the table that the optimizer is or derives from; returns false if
/// there is none.
template <class F>
bool with_fixed_kind(const torch::optim::Optimizer& optimizer, F&& f) {
  return with_fixed_kind_if(
      [&](auto kind) {
        return dynamic_cast<const typename decltype(kind)::Optimizer*>(&optimizer) != nullptr;
      },
      std::forward<F>(f));
}

/// Calls `f` with the kind, also of a described class.
template <class F>
bool with_kind(const torch::optim::Optimizer& optimizer, F&& f) {
  const auto* const described = find_described(optimizer);
  if (!described) return with_fixed_kind(optimizer, std::forward<F>(f));
  f(DescribedKind{described, described->name.c_str()});
  return true;
}

/// Calls `f` with the kind of the table that has that name; returns false if there is none.
template <class F>
bool with_kind(const std::string& name, F&& f) {
  return with_fixed_kind_if([&](auto kind) { return name == kind.kName; }, std::forward<F>(f));
}

}  // namespace tessera
