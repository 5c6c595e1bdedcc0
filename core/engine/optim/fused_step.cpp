#include "engine/optim/fused_step.h"

#include <ATen/core/dispatch/Dispatcher.h>
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

#include "base/device/device.h"
#include "engine/optim/kernel_proof.h"
#include "engine/optim/tensor_kind.h"

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;
using Tensors = std::vector<at::Tensor>;

// Step counts as tensors of a device, for the kernels; parameters of equal counts share one.
class StepTensors {
 public:
  explicit StepTensors(at::Device device) : options_(at::dtype(at::kFloat).device(device)) {}

  at::Tensor operator()(double step) {
    at::Tensor& tensor = tensors_[step];
    if (!tensor.defined()) tensor = at::full({}, step, options_);
    return tensor;
  }

 private:
  const at::TensorOptions options_;
  std::map<double, at::Tensor> tensors_;
};

// Calls `call` with the positions of the parameters of each device and dtype: a device's kernel
// takes alike ones only.
template <class Call>
void for_alike(const Tensors& params, const Call& call) {
  std::map<TensorKind, std::vector<size_t>> alike;
  for (size_t i = 0; i < params.size(); ++i) alike[kind_of(params[i])].push_back(i);
  for (const auto& [kind, positions] : alike) call(positions);
}

Tensors picked(const Tensors& from, const std::vector<size_t>& positions) {
  Tensors result;
  for (const size_t i : positions) {
    if (i < from.size()) result.push_back(from[i]);
  }
  return result;
}

Tensors step_tensors(const Tensors& params, const std::vector<double>& steps,
                     const std::vector<size_t>& positions) {
  StepTensors make(params[positions.front()].device());
  Tensors result;
  for (const size_t i : positions) result.push_back(make(steps[i]));
  return result;
}

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
      call.steps.push_back(static_cast<double>(state.step()));
    }
    if (!call.params.empty()) call.run(options, is_adamw);
  }
}

struct SgdLists {
  Tensors params, grads, buffers;
};

void run_sgd(const SgdLists& lists, const torch::optim::SGDOptions& options, bool first) {
  for_alike(lists.params, [&](const std::vector<size_t>& positions) {
    at::_fused_sgd_(picked(lists.params, positions), picked(lists.grads, positions),
                    picked(lists.buffers, positions), options.weight_decay(), options.momentum(),
                    options.lr(), options.dampening(), options.nesterov(),
                    /*maximize=*/false, first, std::nullopt, std::nullopt);
  });
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
  for (OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
    Tensors params, grads, sums;
    std::vector<double> steps;
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
      steps.push_back(static_cast<double>(state.step()));
    }
    for_alike(params, [&](const std::vector<size_t>& positions) {
      at::_fused_adagrad_(picked(params, positions), picked(grads, positions),
                          picked(sums, positions), step_tensors(params, steps, positions),
                          options.lr(), options.lr_decay(), options.weight_decay(), options.eps(),
                          /*maximize=*/false, std::nullopt, std::nullopt);
    });
  }
}

// Returns true if all devices of the parameters have a kernel for the operator, be it a fallback of
// the backend.
bool has_kernel(torch::optim::Optimizer& optimizer, const char* op) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op, "");
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      const c10::DispatchKey key = backend_key(param.device().type());
      if (param.grad().defined() && !handle.hasComputedKernelForDispatchKey(key)) return false;
    }
  }
  return true;
}

struct FusedKernel {
  const char* op = nullptr;
  FusedStep step = nullptr;
};

// Returns nulls for an optimizer of another class.
FusedKernel fused_kernel(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  const std::type_info& type = typeid(optimizer);
  if (type == typeid(AdamW))
    return {"aten::_fused_adamw_", [](Optimizer& adamw) {
              step_adam<AdamWOptions, AdamWParamState>(adamw, /*is_adamw=*/true);
            }};
  if (type == typeid(Adam))
    return {"aten::_fused_adam_", [](Optimizer& adam) {
              step_adam<AdamOptions, AdamParamState>(adam, /*is_adamw=*/false);
            }};
  if (type == typeid(SGD)) return {"aten::_fused_sgd_", step_sgd};
  if (type == typeid(Adagrad)) return {"aten::_fused_adagrad_", step_adagrad};
  return {};
}

}  // namespace

void FusedAdam::run(bool is_adamw, double lr, double beta1, double beta2, double weight_decay,
                    double eps) const {
  for_alike(params, [&](const std::vector<size_t>& positions) {
    const auto call = [&](auto&& fused) {
      fused(picked(params, positions), picked(grads, positions), picked(exp_avgs, positions),
            picked(exp_avg_sqs, positions), picked(max_exp_avg_sqs, positions),
            step_tensors(params, steps, positions), lr, beta1, beta2, weight_decay, eps,
            /*amsgrad=*/!max_exp_avg_sqs.empty(), /*maximize=*/false, std::nullopt, std::nullopt);
    };
    if (is_adamw) {
      call([](auto&&... args) { at::_fused_adamw_(args...); });
    } else {
      call([](auto&&... args) { at::_fused_adam_(args...); });
    }
  });
}

bool fused_step(torch::optim::Optimizer& optimizer) {
  at::NoGradGuard no_grad;
  const auto [op, step] = fused_kernel(optimizer);
  if (!step || !has_kernel(optimizer, op) || !is_proved(optimizer, step)) return false;
  step(optimizer);
  return true;
}

}  // namespace tessera
