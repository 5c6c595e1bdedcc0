#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torch::optim {
class OptimizerParamGroup;
class OptimizerParamState;
class Optimizer;
}  // namespace torch::optim

namespace tessera {

/// What an optimizer keeps for one parameter, by name, in the words of LibTorch and PyTorch
/// (`exp_avg`, `momentum_buffer`, ...).
struct ParamState {
  std::map<std::string, at::Tensor> tensors;  ///< of the parameter's shape
  std::map<std::string, int64_t> counts;      ///< such as `step`
};

/// Reads the state of a parameter; empty if it has none. Throws `c10::NotImplementedError` for an
/// optimizer other than `CPUAdam` and LibTorch's Adagrad, Adam, AdamW, RMSprop
/// and SGD.
ParamState read_param_state(const torch::optim::Optimizer& optimizer, const at::Tensor& param);

/// Sets the state of a parameter.
void write_param_state(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                       const ParamState& state);

/// True for the optimizers whose state can be read.
bool knows_state(const torch::optim::Optimizer& optimizer);

/// Names of the tensors that the options of a param group make the optimizer keep for a parameter.
/// Throws as `read_param_state` does.
std::vector<std::string> state_names(const torch::optim::Optimizer& optimizer,
                                     torch::optim::OptimizerParamGroup& param_group);

/// The dtype of the tensors that the optimizer keeps for parameters of `param`.
at::ScalarType state_dtype(const torch::optim::Optimizer& optimizer, at::ScalarType param);

/// Makes the state that the first step would make for `param`, of zeros, if it has none. Adagrad
/// has it from the start; SGD with dampening takes its first gradient as it is, and so has none.
void make_param_state(torch::optim::Optimizer& optimizer,
                      torch::optim::OptimizerParamGroup& param_group, const at::Tensor& param);

/// Bytes of tensors that the optimizer keeps; 0 for kinds that `read_param_state` does not know.
int64_t state_nbytes(const torch::optim::Optimizer& optimizer);

}  // namespace tessera
