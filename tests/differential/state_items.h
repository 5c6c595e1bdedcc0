#pragma once

#include <tessera/engine/optimizer_state_dict.h>

#include <string>
#include <utility>
#include <vector>

namespace tessera::differential {

/// The beginning of the names of state of a parameter, by its number in the optimizer.
std::string state_prefix(size_t optimizer, int64_t place);
/// The numbers and tensors of an optimizer's state and options, with names; without the numbers of
/// parameters in groups, which both runs take from one list.
std::vector<std::pair<std::string, at::Tensor>> items_of(size_t optimizer,
                                                         const OptimizerStateDict& state);

}  // namespace tessera::differential
