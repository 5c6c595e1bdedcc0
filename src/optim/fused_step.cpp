#include "optim/fused_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>
#include <memory>
#include <typeinfo>

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;
using Tensors = std::vector<at::Tensor>;

// Step counts as tensors, which the kernels take; parameters of equal counts share one.
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

// Returns the optimizer's state for `param`, and makes it if there is none (`is_new`).
template <class State>
State& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& param, bool& is_new) {
  auto& state = optimizer.state()[param.unsafeGetTensorImpl()];
  is_new = state == nullptr;
  if (is_new) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

template <class Options, class State>
void step_adam(torch::optim::Optimizer& optimizer, bool is_adamw) {
  StepTensors step_tensors;
  for (OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto& options = static_cast<const Options&>(group.options());
    FusedAdam call;
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
    if (!call.params.empty()) call.run(options, is_adamw);
  }
}

struct SgdLists {
  Tensors params, grads, buffers;
};

void run_sgd(SgdLists& lists, const torch::optim::SGDOptions& options, bool first) {
  if (lists.params.empty()) return;
  at::_fused_sgd_(lists.params, lists.grads, lists.buffers, options.weight_decay(),
                  options.momentum(), options.lr(), options.dampening(), options.nesterov(),
                  /*maximize=*/false, first, std::nullopt, std::nullopt);
}

void step_sgd(torch::optim::Optimizer& optimizer) {
  for (OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    SgdLists first, later;  // the kernel initializes a momentum buffer with the gradient
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      SgdLists* lists = &later;
      if (options.momentum() != 0) {
        bool is_new = false;
        auto& state = state_of<torch::optim::SGDParamState>(optimizer, param, is_new);
        if (!state.momentum_buffer().defined()) {
          state.momentum_buffer(at::empty_like(param));
          lists = &first;
        }
        lists->buffers.push_back(state.momentum_buffer());
      }
      lists->params.push_back(param);
      lists->grads.push_back(param.grad());
    }
    run_sgd(first, options, true);
    run_sgd(later, options, false);
  }
}

void step_adagrad(torch::optim::Optimizer& optimizer) {
  StepTensors step_tensors;
  for (OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
    Tensors params, grads, sums, steps;
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      bool is_new = false;
      auto& state = state_of<torch::optim::AdagradParamState>(optimizer, param, is_new);
      if (is_new) {
        state.step(0);
        state.sum(at::full_like(param, options.initial_accumulator_value()));
      }
      state.step(state.step() + 1);
      params.push_back(param);
      grads.push_back(param.grad());
      sums.push_back(state.sum());
      steps.push_back(step_tensors(state.step()));
    }
    if (params.empty()) continue;
    at::_fused_adagrad_(params, grads, sums, steps, options.lr(), options.lr_decay(),
                        options.weight_decay(), options.eps(), /*maximize=*/false, std::nullopt,
                        std::nullopt);
  }
}

bool has_only_floating_gradients(torch::optim::Optimizer& optimizer) {
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (param.grad().defined() && !param.is_floating_point()) return false;
    }
  }
  return true;
}

}  // namespace

void FusedAdam::run(bool is_adamw, double lr, double beta1, double beta2, double weight_decay,
                    double eps) const {
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

bool fused_step(torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  at::NoGradGuard no_grad;
  if (!has_only_floating_gradients(optimizer)) return false;
  const std::type_info& type = typeid(optimizer);
  if (type == typeid(AdamW)) {
    step_adam<AdamWOptions, AdamWParamState>(optimizer, /*is_adamw=*/true);
  } else if (type == typeid(Adam)) {
    step_adam<AdamOptions, AdamParamState>(optimizer, /*is_adamw=*/false);
  } else if (type == typeid(SGD)) {
    step_sgd(optimizer);
  } else if (type == typeid(Adagrad)) {
    step_adagrad(optimizer);
  } else {
    return false;
  }
  return true;
}

}  // namespace tessera
