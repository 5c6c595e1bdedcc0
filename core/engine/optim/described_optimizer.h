#pragma once

#include <tessera/engine/optimizer_traits.h>

namespace tessera {

/// Returns how its user has described the optimizer's class, or the one it derives from; null if
/// there is no description. What is returned lives as long as the process.
const detail::DescribedOptimizer* find_described(const torch::optim::Optimizer& optimizer);

}  // namespace tessera
