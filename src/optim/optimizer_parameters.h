#pragma once

#include <tessera/fully_shard.h>

#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// Throws `c10::ValueError` unless each parameter of the optimizers is one of `model`, in only one
/// optimizer and there in only one param group. `model`: the parameters by name; several tensors of
/// one name are one parameter, and of several names for one tensor the first is reported.
/// `function`: for messages.
void check_optimized_once(const char* function, const std::vector<NamedTensor>& model,
                          const std::vector<const torch::optim::Optimizer*>& optimizers);

/// Returns false for LBFGS, of LibTorch or of another language, whose step needs products over all
/// parameters.
bool steps_elementwise(const torch::optim::Optimizer& optimizer);

}  // namespace tessera
