#pragma once

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// Steps all parameters of an optimizer that have a gradient, by LibTorch's fused kernel.
using FusedStep = void (*)(torch::optim::Optimizer& optimizer);

/// Returns true if `step`, on this machine, gives the results of the optimizer's own step, for the
/// devices and dtypes of the parameters that have a gradient and the options of their param groups.
/// The first call for each combination steps small tensors both ways. `optimizer` must be exactly
/// of one of the `OptimizerKinds`, and is not changed.
bool is_proved(torch::optim::Optimizer& optimizer, FusedStep step);

}  // namespace tessera
