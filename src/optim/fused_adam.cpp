#include "optim/fused_adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <typeinfo>

#include "optim/fused_state.h"

namespace tessera {
namespace {

template <class Options, class State>
FusedAdam collect_group(torch::optim::Optimizer& optimizer,
                        torch::optim::OptimizerParamGroup& group, StepTensors& step_tensors) {
  const auto& options = static_cast<const Options&>(group.options());
  FusedAdam call{.lr = options.lr(),
                 .beta1 = std::get<0>(options.betas()),
                 .beta2 = std::get<1>(options.betas()),
                 .weight_decay = options.weight_decay(),
                 .eps = options.eps()};
  for (const at::Tensor& param : group.params()) {
    if (!param.grad().defined()) continue;
    bool is_new = false;
    State& state = state_of<State>(optimizer, param, is_new);
    if (is_new) {
      state.step(0);
      state.exp_avg(at::zeros_like(param));
      state.exp_avg_sq(at::zeros_like(param));
      if (options.amsgrad()) state.max_exp_avg_sq(at::zeros_like(param));
    }
    state.step(state.step() + 1);
    call.params.push_back(param);
    call.grads.push_back(param.grad());
    call.exp_avgs.push_back(state.exp_avg());
    call.exp_avg_sqs.push_back(state.exp_avg_sq());
    if (options.amsgrad()) call.max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
    call.steps.push_back(step_tensors(state.step()));
  }
  return call;
}

}  // namespace

void FusedAdam::run() const {
  const auto call = [&](auto&& fused) {
    fused(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, lr, beta1, beta2,
          weight_decay, eps, /*amsgrad=*/!max_exp_avg_sqs.empty(), /*maximize=*/false, std::nullopt,
          std::nullopt);
  };
  if (is_adamw) {
    call([](auto&&... args) { at::_fused_adamw_(args...); });
  } else {
    call([](auto&&... args) { at::_fused_adam_(args...); });
  }
}

bool is_adam(const torch::optim::Optimizer& optimizer) {
  return typeid(optimizer) == typeid(torch::optim::AdamW) ||
         typeid(optimizer) == typeid(torch::optim::Adam);
}

void step_adam(torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  const bool is_adamw = typeid(optimizer) == typeid(AdamW);
  StepTensors step_tensors;
  for (OptimizerParamGroup& group : optimizer.param_groups()) {
    FusedAdam call =
        is_adamw ? collect_group<AdamWOptions, AdamWParamState>(optimizer, group, step_tensors)
                 : collect_group<AdamOptions, AdamParamState>(optimizer, group, step_tensors);
    call.is_adamw = is_adamw;
    if (!call.params.empty()) call.run();
  }
}

}  // namespace tessera
