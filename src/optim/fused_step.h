#pragma once

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// Steps `optimizer` with LibTorch's fused kernels: all parameters that have a gradient, by the
/// options of their param groups, keeping state where the optimizer itself keeps it (so plain and
/// fused steps can be mixed). Returns false, with nothing changed, unless it is exactly an AdamW,
/// Adam, SGD or Adagrad with dense floating parameters.
bool fused_step(torch::optim::Optimizer& optimizer);

}  // namespace tessera
