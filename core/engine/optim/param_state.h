#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace torch::optim {
class OptimizerParamGroup;
class OptimizerParamState;
class Optimizer;
}  // namespace torch::optim

namespace tessera {

/// An optimizer's state for one parameter, by the names of LibTorch and PyTorch (`exp_avg`,
/// `momentum_buffer`, ...).
struct ParamState {
  /// They have the shapes that `state_sizes()` says, but for `other_shapes()`.
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, double>
      counts;  ///< such as `step`; other numbers, such as `mu_product`, too

  int64_t nbytes() const;  ///< of the tensors
};

/// Returns true for whole numbers that a double has exactly.
inline bool is_whole(double number) {
  return number == std::trunc(number) && std::abs(number) <= 0x1p53;
}

/// Throws `c10::ValueError` unless an optimizer can have these `counts`: only one of another
/// language has some that are not whole.
void check_counts(const torch::optim::Optimizer& optimizer,
                  const std::map<std::string, double>& counts);

/// Returns the state of a parameter; empty if it has none. Throws `c10::NotImplementedError` for an
/// optimizer other than a `ForeignOptimizer`, `CPUAdam`, `Muon`, LibTorch's Adagrad, Adam, AdamW,
/// RMSprop and SGD, and those that are described by `OptimizerTraits`.
ParamState read_param_state(const torch::optim::Optimizer& optimizer, const at::Tensor& param);

/// Sets the state of a parameter.
void write_param_state(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                       const ParamState& state);

/// Make the state of `from`, whatever it is, that of `to`; or remove a parameter's state, or all.
/// For optimizers of any class.
void move_param_state(torch::optim::Optimizer& optimizer, const at::Tensor& from,
                      const at::Tensor& to);
void erase_param_state(torch::optim::Optimizer& optimizer, const at::Tensor& param);
void erase_state(torch::optim::Optimizer& optimizer);
bool has_param_state(const torch::optim::Optimizer& optimizer, const at::Tensor& param);

/// Replaces each tensor of a parameter's state by `f` of it, without a new state object.
void replace_state_tensors(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                           const std::function<at::Tensor(const at::Tensor&)>& f);

/// Returns true for the optimizers whose state can be read.
bool knows_state(const torch::optim::Optimizer& optimizer);

/// The state that may have another shape than its parameter: tensors that a described class names,
/// or any of a `ForeignOptimizer` of an unknown kind that is not elementwise.
struct OtherShapes {
  std::set<std::string> names = {};
  bool any = false;
  bool contains(const std::string& name) const { return any || names.contains(name); }
};
OtherShapes other_shapes(const torch::optim::Optimizer& optimizer);

/// A tensor that an optimizer keeps for a parameter or part.
struct StateTensor {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  int64_t nbytes() const;
};

/// Returns the tensors that the optimizer keeps for parameters, or parts, of this dtype and shape,
/// with the options of a param group. Throws as `read_param_state` does.
std::vector<StateTensor> state_tensors(const torch::optim::Optimizer& optimizer,
                                       torch::optim::OptimizerParamGroup& param_group,
                                       at::ScalarType param, at::IntArrayRef sizes);

/// Returns the dtype of those with a value for each element; `param` for an unknown class.
at::ScalarType state_dtype(const torch::optim::Optimizer& optimizer,
                           torch::optim::OptimizerParamGroup& param_group, at::ScalarType param);

/// The option in which an optimizer says how it keeps its state. Loads leave it as it is.
constexpr const char* kStateDtype = "state_dtype";

/// Makes the state of zeros that the first step would make for `param`, if it has none. Does
/// nothing for SGD with dampening, whose buffer starts as the first gradient, and for described
/// classes; Adagrad has its state from the start.
void make_param_state(torch::optim::Optimizer& optimizer,
                      torch::optim::OptimizerParamGroup& param_group, const at::Tensor& param);

/// Returns the bytes of tensors that the optimizer keeps; 0 for kinds that `read_param_state` does
/// not support.
int64_t state_nbytes(const torch::optim::Optimizer& optimizer);

/// Returns the name of the class that the optimizer is or derives from: LibTorch's, `CPUAdam`,
/// `Muon` or a described one; for a `ForeignOptimizer`, its `kind()`. Throws as `read_param_state`
/// does.
std::string optimizer_kind(const torch::optim::Optimizer& optimizer);

/// Returns the options of a param group by LibTorch's names; flags are 0 or 1, and a pair such as
/// `betas` becomes `beta1` and `beta2`.
std::map<std::string, double> read_options(torch::optim::Optimizer& optimizer, size_t param_group);

/// Returns those on which a step depends: all, or the learning rate alone of a class whose options
/// are unknown, if it has one.
std::map<std::string, double> step_options(torch::optim::Optimizer& optimizer, size_t param_group);

/// Sets the options that `values` contain.
void write_options(torch::optim::Optimizer& optimizer, size_t param_group,
                   const std::map<std::string, double>& values);

/// Read and write a param group that an optimizer of another class holds for one of the class of
/// `kind_of` (not a `ForeignOptimizer`).
std::map<std::string, double> read_options(const torch::optim::Optimizer& kind_of,
                                           torch::optim::OptimizerParamGroup& param_group);
void write_options(const torch::optim::Optimizer& kind_of,
                   torch::optim::OptimizerParamGroup& param_group,
                   const std::map<std::string, double>& values);

/// Return and set the learning rate of a param group, for optimizers of any class. A user's class
/// may have none: nothing is then returned, or set.
std::optional<double> learning_rate(const torch::optim::Optimizer& optimizer, size_t param_group);
void set_learning_rate(torch::optim::Optimizer& optimizer, size_t param_group, double lr);

}  // namespace tessera
