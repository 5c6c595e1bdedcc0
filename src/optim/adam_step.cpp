#include "optim/adam_step.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "optim/adam_loop.h"

namespace tessera {
namespace {

AdamNumbers numbers_of(const AdamRule& rule, int64_t step) {
  const auto correction = [&](double beta) {
    return rule.bias_correction ? 1 - std::pow(beta, static_cast<double>(step)) : 1.0;
  };
  return {.beta1 = rule.beta1,
          .beta2 = rule.beta2,
          .eps = rule.eps,
          .l2 = rule.adamw_mode ? 0 : rule.weight_decay,
          .decay = rule.adamw_mode ? 1 - rule.lr * rule.weight_decay : 1,
          .step_size = rule.lr / correction(rule.beta1),
          .second_correction = 1 / std::sqrt(correction(rule.beta2))};
}

// Parameters of one device, as the operators take them.
struct FusedLists {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, steps;
  std::vector<at::Tensor> originals;  // of `params`, which are copies where the dtype is another
};

void run(const AdamRule& rule, const FusedLists& lists) {
  const auto call = [&](auto&& fused) {
    fused(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, at::TensorList(),
          lists.steps, rule.lr, rule.beta1, rule.beta2, rule.weight_decay, rule.eps,
          /*amsgrad=*/false, /*maximize=*/false, std::nullopt, std::nullopt);
  };
  if (rule.adamw_mode) {
    call([](auto&&... args) { at::_fused_adamw_(args...); });
  } else {
    call([](auto&&... args) { at::_fused_adam_(args...); });
  }
  for (size_t i = 0; i < lists.params.size(); ++i)
    if (!lists.params[i].is_same(lists.originals[i])) lists.originals[i].copy_(lists.params[i]);
}

}  // namespace

void step_on_host(const AdamRule& rule, const AdamParam& param) {
  const bool rounds = param.rounded.defined();
  const AdamLoop loop = adam_loop(param.param.scalar_type(), param.grad.scalar_type(),
                                  rounds ? param.rounded.scalar_type() : at::ScalarType::Undefined);
  TORCH_INTERNAL_ASSERT(loop);
  const AdamNumbers numbers = numbers_of(rule, param.step);
  // It brings the threads, and walks through tensors that have gaps.
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).resize_outputs(false);
  config.add_output(param.param).add_output(param.exp_avg).add_output(param.exp_avg_sq);
  if (rounds) config.add_output(param.rounded);
  auto iterator = config.add_const_input(param.grad).build();
  const int operands = iterator.ntensors(), grad = operands - 1;
  std::array<int64_t, 5> item_sizes{};
  for (int k = 0; k < operands; ++k) item_sizes[k] = iterator.element_size(k);
  iterator.for_each([&](char** data, const int64_t* strides, int64_t numel, int64_t rows) {
    const bool is_dense = std::equal(item_sizes.begin(), item_sizes.begin() + operands, strides);
    const int64_t count = is_dense ? numel : 1;
    for (int64_t row = 0; row < rows; ++row) {
      const auto at = [&](int k, int64_t i) {
        return data[k] + row * strides[operands + k] + i * strides[k];
      };
      for (int64_t i = 0; i < numel; i += count)
        loop(numbers, {at(0, i), at(grad, i), at(1, i), at(2, i), rounds ? at(3, i) : nullptr},
             count);
    }
  });
  // What autograd has kept of it for a backward is out of date.
  param.param.unsafeGetTensorImpl()->bump_version();
}

void step_by_operators(const AdamRule& rule, const std::vector<AdamParam>& params) {
  std::map<std::string, FusedLists> devices;
  for (const AdamParam& param : params) {
    FusedLists& lists = devices[param.param.device().str()];
    const at::ScalarType dtype = param.exp_avg.scalar_type();
    lists.originals.push_back(param.param);
    lists.params.push_back(param.param.to(dtype));
    lists.grads.push_back(param.grad.to(dtype));
    lists.exp_avgs.push_back(param.exp_avg);
    lists.exp_avg_sqs.push_back(param.exp_avg_sq);
    // After infinitely many steps nothing is left to correct.
    const double step = rule.bias_correction ? static_cast<double>(param.step)
                                             : std::numeric_limits<double>::infinity();
    lists.steps.push_back(at::full({}, step, at::device(param.param.device()).dtype(at::kFloat)));
  }
  for (const auto& [device, lists] : devices) run(rule, lists);
}

}  // namespace tessera
