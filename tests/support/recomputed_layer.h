#pragma once

#include <torch/torch.h>

namespace tessera::testing {

/// Runs a layer again in backward, by a backward inside the backward.
struct RecomputedLayer : torch::autograd::Function<RecomputedLayer> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x,
                               torch::nn::Linear layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer.get());
    at::NoGradGuard no_grad;
    return layer->forward(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list grads) {
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    at::AutoGradMode enable_grad(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({layer->forward(x)}, {grads[0]});
    return {x.grad(), torch::Tensor()};
  }
};

}  // namespace tessera::testing
