#pragma once

#include <tessera/engine/fully_shard.h>

#include <string>
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

/// Throws `c10::NotImplementedError` for LBFGS, of LibTorch or of another language, whose step
/// needs products over all parameters, and for SparseAdam, which steps sparse gradients alone.
void check_class(const char* function, const torch::optim::Optimizer& optimizer);

/// Returns true if the optimizer's step is known to treat each element of a parameter by itself, in
/// all param groups or in one: for the exact classes of `OptimizerKinds` and described ones, as a
/// derived one may step differently, and a `ForeignOptimizer` that says so.
bool steps_elementwise(const torch::optim::Optimizer& optimizer);
bool steps_elementwise(const torch::optim::Optimizer& optimizer, size_t param_group);

/// Returns true if the optimizer steps matrices, and stacks of them, that are cut: see
/// `step_muon()`.
bool steps_matrices(const torch::optim::Optimizer& optimizer);

/// Returns true if the optimizer's class is described as one that steps each row by itself.
bool steps_rows(const torch::optim::Optimizer& optimizer);

/// Returns true if `muon_groups()` gives Muon a parameter of this name and so many dims.
bool takes_muon(const std::string& name, int64_t dims, const std::vector<std::string>& exceptions);

/// Returns the end of an error about parameters that are cut for an optimizer that is not known to
/// step elementwise.
std::string ways_out_of_cuts(const torch::optim::Optimizer& optimizer);

}  // namespace tessera
