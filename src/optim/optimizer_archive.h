#pragma once

#include <tessera/optimizer_state_dict.h>

#include <string>

namespace tessera {

/// What the optimizer's `save()` writes, as the bytes of a file.
std::string save_optimizer(const torch::optim::Optimizer& optimizer);

/// The state in such bytes, with tensors on the CPU. Throws `c10::NotImplementedError` if there is
/// none, because the class of the optimizer does not override `save()`. `function`: for messages.
OptimizerStateDict parse_optimizer(const std::string& bytes, const char* function);

/// Calls the optimizer's `load()` with such bytes.
void load_optimizer(torch::optim::Optimizer& optimizer, const std::string& bytes);

/// Such bytes of a state whose param groups list their parameters as the optimizer's do.
std::string write_optimizer(const OptimizerStateDict& state_dict);

}  // namespace tessera
