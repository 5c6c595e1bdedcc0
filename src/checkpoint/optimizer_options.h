#pragma once

#include <map>
#include <string>

namespace torch::optim {
class Optimizer;
class OptimizerParamGroup;
}  // namespace torch::optim

namespace tessera {

/// The class that the optimizer is or derives from: LibTorch's `Adagrad`, `Adam`, `AdamW`,
/// `RMSprop` or `SGD`, or `CPUAdam`. Throws `c10::NotImplementedError` for another.
std::string optimizer_kind(const torch::optim::Optimizer& optimizer);

/// The options of a param group by name, in LibTorch's words; flags are 0 or 1, and a pair such as
/// `betas` is `beta1` and `beta2`.
std::map<std::string, double> read_options(const std::string& optimizer_kind,
                                           torch::optim::OptimizerParamGroup& param_group);

/// Sets those options that are in `values`.
void write_options(const std::string& optimizer_kind,
                   torch::optim::OptimizerParamGroup& param_group,
                   const std::map<std::string, double>& values);

}  // namespace tessera
