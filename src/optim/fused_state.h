#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>

namespace tessera {

/// Step counts as tensors, which the kernels take; parameters of equal counts share one.
class StepTensors {
 public:
  at::Tensor operator()(int64_t step) {
    at::Tensor& tensor = tensors_[step];
    if (!tensor.defined()) tensor = at::full({}, static_cast<double>(step), at::kFloat);
    return tensor;
  }

 private:
  std::map<int64_t, at::Tensor> tensors_;
};

/// Returns the optimizer's state for `param`, and makes it if there is none (`is_new`).
template <class State>
State& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& param, bool& is_new) {
  auto& state = optimizer.state()[param.unsafeGetTensorImpl()];
  is_new = state == nullptr;
  if (is_new) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

}  // namespace tessera
