#pragma once

#include <tessera/engine/optimizer_state_dict.h>

#include <string>

namespace tessera {

/// Returns the output of the optimizer's `save()`, as the bytes of a file.
std::string save_optimizer(const torch::optim::Optimizer& optimizer);

/// Parses such bytes into a state with tensors on the CPU. Throws `c10::NotImplementedError` if
/// they hold no state, because the class of the optimizer does not override `save()`. `function`:
/// for messages.
OptimizerStateDict parse_optimizer(const std::string& bytes, const char* function);

/// Calls the optimizer's `load()` with such bytes.
void load_optimizer(torch::optim::Optimizer& optimizer, const std::string& bytes);

/// Returns such bytes for a state whose param groups list their parameters as the optimizer's do.
std::string write_optimizer(const OptimizerStateDict& state_dict);

}  // namespace tessera
