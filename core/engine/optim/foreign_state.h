#pragma once

#include <tessera/engine/foreign_optimizer.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "engine/optim/param_state.h"

namespace tessera {

/// Returns the optimizer as what it is; null for LibTorch's and its users' own classes.
const ForeignOptimizer* as_foreign(const torch::optim::Optimizer& optimizer);
ForeignOptimizer* as_foreign(torch::optim::Optimizer& optimizer);

/// Returns the state of a parameter. Throws `c10::NotImplementedError` for values other than
/// tensors and whole numbers.
ParamState foreign_param_state(const ForeignOptimizer& optimizer, const at::Tensor& param);
/// Returns the bytes of all tensors in the state, of any class, but for counts.
int64_t foreign_state_nbytes(const ForeignOptimizer& optimizer);
ForeignOptimizer::Values values_of(const ParamState& state);

/// Returns the options of a param group that are numbers or flags; `betas` becomes `beta1` and
/// `beta2`.
std::map<std::string, double> foreign_options(const ForeignOptimizer& optimizer, size_t group);
/// Sets those that the optimizer has, in its own types.
void set_foreign_options(ForeignOptimizer& optimizer, size_t group,
                         const std::map<std::string, double>& numbers);

}  // namespace tessera
