#pragma once

#include <map>
#include <string>

namespace torch::optim {
class Optimizer;
class OptimizerParamGroup;
}  // namespace torch::optim

namespace tessera {

/// Returns the class that the optimizer is or derives from: LibTorch's `Adagrad`, `Adam`, `AdamW`,
/// `RMSprop` or `SGD`, or `CPUAdam`. Throws `c10::NotImplementedError` for others.
std::string optimizer_kind(const torch::optim::Optimizer& optimizer);

/// Returns the options of a param group by LibTorch's names; flags are 0 or 1, and a pair such as
/// `betas` becomes `beta1` and `beta2`.
std::map<std::string, double> read_options(const std::string& optimizer_kind,
                                           torch::optim::OptimizerParamGroup& param_group);

/// Sets the options that `values` contain.
void write_options(const std::string& optimizer_kind,
                   torch::optim::OptimizerParamGroup& param_group,
                   const std::map<std::string, double>& values);

}  // namespace tessera
