#include "optim/adam_step.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "optim/adam_loop.h"
#include "optim/fused_adam.h"

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

// Parameters of one device, as LibTorch's fused operators take them.
struct FusedLists {
  FusedAdam call;
  std::vector<at::Tensor> originals;  // of `call`'s parameters, which are copies for other dtypes
};

void run(const AdamRule& rule, FusedLists& lists) {
  auto& [call, originals] = lists;
  call.is_adamw = rule.adamw_mode;
  call.lr = rule.lr;
  call.beta1 = rule.beta1;
  call.beta2 = rule.beta2;
  call.weight_decay = rule.weight_decay;
  call.eps = rule.eps;
  call.run();
  for (size_t i = 0; i < originals.size(); ++i)
    if (!call.params[i].is_same(originals[i])) originals[i].copy_(call.params[i]);
}

}  // namespace

void step_on_host(const AdamRule& rule, const AdamParam& param) {
  const bool rounds = param.rounded.defined();
  const AdamLoop loop = adam_loop(param.param.scalar_type(), param.grad.scalar_type(),
                                  rounds ? param.rounded.scalar_type() : at::ScalarType::Undefined);
  TORCH_INTERNAL_ASSERT(loop);
  const AdamNumbers numbers = numbers_of(rule, param.step);
  // TensorIterator provides threads, and iterates over tensors that have gaps.
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
  // Values that autograd has saved for a backward are out of date.
  param.param.unsafeGetTensorImpl()->bump_version();
}

void step_by_operators(const AdamRule& rule, const std::vector<AdamParam>& params) {
  std::map<std::string, FusedLists> devices;
  for (const AdamParam& param : params) {
    auto& [call, originals] = devices[param.param.device().str()];
    const at::ScalarType dtype = param.exp_avg.scalar_type();
    originals.push_back(param.param);
    call.params.push_back(param.param.to(dtype));
    call.grads.push_back(param.grad.to(dtype));
    call.exp_avgs.push_back(param.exp_avg);
    call.exp_avg_sqs.push_back(param.exp_avg_sq);
    // After infinitely many steps nothing is left to correct.
    const double step = rule.bias_correction ? static_cast<double>(param.step)
                                             : std::numeric_limits<double>::infinity();
    call.steps.push_back(at::full({}, step, at::device(param.param.device()).dtype(at::kFloat)));
  }
  for (auto& [device, lists] : devices) run(rule, lists);
}

}  // namespace tessera
