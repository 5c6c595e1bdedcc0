#pragma once

namespace torch::optim {
class Optimizer;
}

namespace tessera {

/// Steps all parameters of `optimizer` that have a gradient with LibTorch's fused kernels, by the
/// options of their param groups. State is kept where the optimizer itself keeps it, so plain and
/// fused steps can be mixed. Returns false, with nothing changed, unless the optimizer is exactly
/// an AdamW, Adam, SGD or Adagrad with dense floating-point parameters.
bool fused_step(torch::optim::Optimizer& optimizer);

}  // namespace tessera
