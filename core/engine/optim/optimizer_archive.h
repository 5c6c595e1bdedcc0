#pragma once

#include <tessera/engine/optimizer_state_dict.h>

#include <cstddef>
#include <functional>
#include <string>

namespace tessera {

/// Writes and reads the archive of an optimizer from functions that know its state and options.
void save_values(torch::serialize::OutputArchive& archive, const torch::optim::Optimizer& optimizer,
                 const std::function<OptimizerStateDict::Values(const at::Tensor&)>& read_state,
                 const std::function<OptimizerStateDict::Values(size_t)>& read_options);
void load_values(
    torch::serialize::InputArchive& archive, const torch::optim::Optimizer& optimizer,
    const std::function<void(const at::Tensor&, const OptimizerStateDict::Values&)>& write_state,
    const std::function<void(size_t, const OptimizerStateDict::Values&)>& write_options);

/// Returns the output of the optimizer's `save()`, as the bytes of a file; of a described class,
/// what its traits show.
std::string save_optimizer(const torch::optim::Optimizer& optimizer);

/// Parses such bytes into a state with tensors on the CPU. Throws `c10::NotImplementedError` if
/// they hold no state, because the class of the optimizer does not override `save()`. `function`:
/// for messages.
OptimizerStateDict parse_optimizer(const std::string& bytes, const char* function);

/// Calls the optimizer's `load()` with such bytes, or sets what its traits show.
void load_optimizer(torch::optim::Optimizer& optimizer, const std::string& bytes);

/// Returns such bytes for a state whose param groups list their parameters as the optimizer's do.
std::string write_optimizer(const OptimizerStateDict& state_dict);

}  // namespace tessera
