#include "optim/fused_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/sgd.h>

#include <typeinfo>
#include <vector>

#include "optim/fused_adam.h"
#include "optim/fused_state.h"

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;
using Tensors = std::vector<at::Tensor>;

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

bool fused_step(torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  at::NoGradGuard no_grad;
  if (!has_only_floating_gradients(optimizer)) return false;
  const std::type_info& type = typeid(optimizer);
  if (is_adam(optimizer)) {
    step_adam(optimizer);
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
