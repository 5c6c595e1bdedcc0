#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "base/memory/dense_strides.h"
#include "comm/group/encoding.h"
#include "engine/optim/adam_loop.h"
#include "engine/optim/cpu_adam_step.h"
#include "engine/optim/fused_step.h"
#include "engine/optim/small_state.h"
#include "engine/unit/layout.h"
#include "engine/unit/note_write.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

void check_options(const CPUAdamOptions& options) {
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK_VALUE(options.lr() >= 0, "[CPUAdam] lr must not be negative; got ", options.lr());
  TORCH_CHECK_VALUE(options.eps() >= 0, "[CPUAdam] eps must not be negative; got ", options.eps());
  TORCH_CHECK_VALUE(options.weight_decay() >= 0,
                    "[CPUAdam] weight_decay must not be negative; got ", options.weight_decay());
  TORCH_CHECK_VALUE(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
                    "[CPUAdam] betas must be in [0, 1); got ", beta1, " and ", beta2);
  const at::ScalarType state = options.state_dtype();
  TORCH_CHECK_VALUE(state == at::kFloat || state == at::kBFloat16 || state == at::kByte,
                    "[CPUAdam] state_dtype must be Float, BFloat16 or Byte; got ", state);
}

// Returns the options of a group, with the optimizer's defaults filled in as LibTorch does for its
// own classes.
std::unique_ptr<CPUAdamOptions> group_options(const OptimizerParamGroup& group,
                                              const CPUAdamOptions& defaults) {
  if (!group.has_options()) return std::make_unique<CPUAdamOptions>(defaults);
  const CPUAdamOptions initial;
  auto own = std::make_unique<CPUAdamOptions>(static_cast<const CPUAdamOptions&>(group.options()));
  if (own->lr() == initial.lr()) own->lr(defaults.lr());
  if (own->bias_correction() == initial.bias_correction())
    own->bias_correction(defaults.bias_correction());
  if (own->betas() == initial.betas()) own->betas(defaults.betas());
  if (own->eps() == initial.eps()) own->eps(defaults.eps());
  if (own->weight_decay() == initial.weight_decay()) own->weight_decay(defaults.weight_decay());
  if (own->adamw_mode() == initial.adamw_mode()) own->adamw_mode(defaults.adamw_mode());
  if (own->seed() == initial.seed()) own->seed(defaults.seed());
  return own;
}

CPUAdamParamState& adam_state_of(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                                 const CPUAdamOptions& options) {
  auto& own = optimizer.state()[param.unsafeGetTensorImpl()];
  const at::ScalarType dtype = moment_dtype(param.scalar_type(), options.state_dtype());
  const at::Tensor like = param.detach();
  if (!own) own = std::make_unique<CPUAdamParamState>();
  auto& state = static_cast<CPUAdamParamState&>(*own);
  if (!state.exp_avg().defined()) {
    state.exp_avg(at::zeros_like(like, like.options().dtype(dtype)));
    state.exp_avg_sq(at::zeros_like(like, like.options().dtype(dtype)));
    if (dtype == at::kByte) {
      state.exp_avg_scale(at::zeros({blocks_of(like.numel())}, at::kFloat));
      state.exp_avg_sq_scale(at::zeros({blocks_of(like.numel())}, at::kFloat));
    }
  }
  // The parameter may have been converted to another dtype since, and state may have been loaded.
  const auto first = converted({state.exp_avg(), state.exp_avg_scale()}, true, dtype, like);
  state.exp_avg(first.values).exp_avg_scale(first.scales);
  const auto second = converted({state.exp_avg_sq(), state.exp_avg_sq_scale()}, false, dtype, like);
  state.exp_avg_sq(second.values).exp_avg_sq_scale(second.scales);
  return state;
}

AdamNumbers numbers_of(const CPUAdamOptions& options, int64_t step) {
  const auto [beta1, beta2] = options.betas();
  const auto correction = [&](double beta) {
    return options.bias_correction() ? 1 - std::pow(beta, static_cast<double>(step)) : 1.0;
  };
  const double decay = options.weight_decay();
  return {.beta1 = beta1,
          .beta2 = beta2,
          .eps = options.eps(),
          .l2 = options.adamw_mode() ? 0 : decay,
          .decay = options.adamw_mode() ? 1 - options.lr() * decay : 1,
          .step_size = options.lr() / correction(beta1),
          .second_correction = 1 / std::sqrt(correction(beta2))};
}

// Steps a DistTensor in the placements of its moments. They may be sharded where the parameter is
// not.
void step_dist(const CPUAdamOptions& options, const at::Tensor& param, CPUAdamParamState& state) {
  const DeviceMesh& mesh = mesh_of(param);
  const Placements& placements = placements_of(state.exp_avg());
  const auto place = [&](const at::Tensor& tensor) {
    return placements_of(tensor) == placements ? tensor : redistribute(tensor, mesh, placements);
  };
  if (placements_of(state.exp_avg_sq()) != placements) state.exp_avg_sq(place(state.exp_avg_sq()));
  const at::Tensor placed = place(param.detach()), grad = place(param.grad());
  const AdamParam local{local_of(placed), local_of(grad), local_of(state.exp_avg()),
                        local_of(state.exp_avg_sq()), state.step()};
  local.param.is_cpu() ? step_on_host(options, local) : step_by_operators(options, {local});
  if (placements_of(param) != placements)
    param.copy_(redistribute(placed, mesh, placements_of(param)));
  note_write(param);
}

void step_group(CPUAdam& optimizer, OptimizerParamGroup& group, const RoundedParams& rounded) {
  const auto& options = static_cast<const CPUAdamOptions&>(group.options());
  std::vector<AdamParam> elsewhere;
  for (const at::Tensor& param : group.params()) {
    if (!param.grad().defined()) continue;
    CPUAdamParamState& state = adam_state_of(optimizer, param, options);
    state.step(state.step() + 1);
    if (is_dist(param)) {
      step_dist(options, param, state);
      continue;
    }
    AdamParam own{param, param.grad(), state.exp_avg(), state.exp_avg_sq(), state.step()};
    own.exp_avg_scale = state.exp_avg_scale();
    own.exp_avg_sq_scale = state.exp_avg_sq_scale();
    const auto it = rounded.find(param.unsafeGetTensorImpl());
    if (it != rounded.end()) own.rounded = it->second;
    param.is_cpu() ? step_on_host(options, own) : elsewhere.push_back(own);
  }
  if (!elsewhere.empty()) step_by_operators(options, elsewhere);
}

// A block of elements: the memory of its tensors, and its moments and gradients in float.
struct Block {
  int64_t numel;
  void *param, *grad, *moments[2], *rounded;
  float* scales[2];  // null for moments in bfloat16
  float wide[2][kStateBlock], wide_grad[kStateBlock];

  void read() {
    for (const int k : {0, 1}) {
      scales[k]
          ? decode_block(static_cast<uint8_t*>(moments[k]), *scales[k], k == 0, numel, wide[k])
          : widen(at::kBFloat16, moments[k], numel, wide[k]);
    }
  }
  void write(const uint32_t* noise) {
    for (const int k : {0, 1}) {
      if (scales[k]) {
        *scales[k] = encode_block(wide[k], k == 0, numel, static_cast<uint8_t*>(moments[k]));
      } else {
        round_with_noise(wide[k], wide_grad, noise[k], numel, static_cast<uint16_t*>(moments[k]));
      }
    }
  }
};

// Steps block by block, in float copies of the moments that stay in the cache.
void step_small(const CPUAdamOptions& options, const AdamParam& param, AdamLoop loop) {
  const std::array<at::Tensor, 5> tensors = {param.param, param.exp_avg, param.exp_avg_sq,
                                             param.rounded, param.grad};
  const std::vector<int64_t> strides = dense_strides(param.param);
  std::array<at::Tensor, 5> flat;
  for (int k = 0; k < 5; ++k)
    if (tensors[k].defined()) flat[k] = flat_in_order(tensors[k].detach(), strides);
  const uint32_t noise[] = {noise_start(options.seed(), param.step, false),
                            noise_start(options.seed(), param.step, true)};
  const AdamNumbers numbers = numbers_of(options, param.step);
  const int64_t numel = param.param.numel();
  at::parallel_for(0, blocks_of(numel), /*grain_size=*/16, [&](int64_t from, int64_t to) {
    Block own;
    for (int64_t block = from; block < to; ++block) {
      const int64_t begin = block * kStateBlock;
      const auto at = [&](const at::Tensor& tensor, int64_t i) -> void* {
        if (!tensor.defined()) return nullptr;
        return static_cast<char*>(tensor.data_ptr()) + i * tensor.element_size();
      };
      own.numel = std::min(kStateBlock, numel - begin);
      own.param = at(flat[0], begin), own.rounded = at(flat[3], begin);
      own.moments[0] = at(flat[1], begin), own.moments[1] = at(flat[2], begin);
      own.grad = at(flat[4], begin);
      own.scales[0] = static_cast<float*>(at(param.exp_avg_scale, block));
      own.scales[1] = static_cast<float*>(at(param.exp_avg_sq_scale, block));
      own.read();
      loop(numbers, {own.param, own.grad, own.wide[0], own.wide[1], own.rounded}, own.numel);
      widen(param.grad.scalar_type(), own.grad, own.numel, own.wide_grad);
      own.write(noise);
    }
  });
  for (int k = 0; k < 4; ++k) {
    if (tensors[k].defined() && !flat[k].is_alias_of(tensors[k]))
      tensors[k].copy_(at::as_strided(flat[k], tensors[k].sizes(), strides));
  }
}

}  // namespace

void check_small(at::ScalarType state, at::ScalarType param, at::Device device, bool is_dist,
                 const std::string& name) {
  const char* const why = state == at::kFloat             ? nullptr
                          : param == at::kDouble          ? "it is Double"
                          : !device.is_cpu()              ? "it is not in host memory"
                          : state == at::kByte && is_dist ? "it is a DistTensor"
                                                          : nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(!why, "[CPUAdam] state_dtype ", state, " is not for ", name, ": ",
                              why, ". Put it into a param group with state_dtype Float");
}

void check_adam_gradient(const at::Tensor& param) {
  const at::Tensor& grad = param.grad();
  TORCH_CHECK(!grad.is_sparse(), "CPUAdam does not support sparse gradients");
  TORCH_CHECK_NOT_IMPLEMENTED(
      adam_loop(param.scalar_type(), grad.scalar_type()),
      "[CPUAdam] parameters must be Float, BFloat16, Half or Double, and gradients of the "
      "parameter's dtype or Float, or, of Float parameters, BFloat16 or Half; got a gradient of ",
      grad.scalar_type(), " for a ", param.scalar_type(), " parameter");
}

void step_on_host(const CPUAdamOptions& options, const AdamParam& param) {
  const bool rounds = param.rounded.defined();
  const AdamLoop loop = adam_loop(param.param.scalar_type(), param.grad.scalar_type(),
                                  rounds ? param.rounded.scalar_type() : at::ScalarType::Undefined);
  TORCH_INTERNAL_ASSERT(loop);
  if (param.exp_avg.element_size() < static_cast<int64_t>(sizeof(float))) {
    step_small(options, param, loop);
    return note_write(param.param);
  }
  const AdamNumbers numbers = numbers_of(options, param.step);
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
  note_write(param.param);
}

void step_by_operators(const CPUAdamOptions& options, const std::vector<AdamParam>& params) {
  // The kernels take four tensors of equal dtype and strides, and walk through their memory: others
  // are stepped as copies.
  FusedAdam call;
  for (const AdamParam& param : params) {
    const at::ScalarType dtype = param.exp_avg.scalar_type();
    call.params.push_back(param.param.to(dtype).contiguous());
    call.grads.push_back(param.grad.to(dtype).contiguous());
    call.exp_avgs.push_back(param.exp_avg.contiguous());
    call.exp_avg_sqs.push_back(param.exp_avg_sq.contiguous());
    // After infinitely many steps nothing is left to correct.
    call.steps.push_back(options.bias_correction() ? static_cast<double>(param.step)
                                                   : std::numeric_limits<double>::infinity());
  }
  call.run(options, options.adamw_mode());
  const auto give_back = [](const at::Tensor& stepped, const at::Tensor& own) {
    if (!stepped.is_same(own)) own.copy_(stepped);
  };
  for (size_t i = 0; i < params.size(); ++i) {
    give_back(call.params[i], params[i].param);
    give_back(call.exp_avgs[i], params[i].exp_avg);
    give_back(call.exp_avg_sqs[i], params[i].exp_avg_sq);
    note_write(params[i].param);
  }
}

CPUAdamOptions::CPUAdamOptions(double lr) : lr_(lr) {}
double CPUAdamOptions::get_lr() const { return lr(); }
void CPUAdamOptions::set_lr(double lr) { this->lr(lr); }

void CPUAdamOptions::serialize(OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(bias_correction);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(adamw_mode);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(state_dtype);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(seed);
}
void CPUAdamOptions::serialize(InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, bias_correction);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, adamw_mode);
  c10::IValue value;  // earlier archives have neither
  if (archive.try_read("state_dtype", value)) state_dtype(value.to<at::ScalarType>());
  if (archive.try_read("seed", value)) seed(value.toInt());
}

void CPUAdamParamState::serialize(OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
  if (!exp_avg_scale().defined()) return;
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_scale);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq_scale);
}
void CPUAdamParamState::serialize(InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_sq);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_scale);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_sq_scale);
}

CPUAdam::CPUAdam(const std::vector<OptimizerParamGroup>& param_groups, CPUAdamOptions defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(), std::make_unique<CPUAdamOptions>(defaults)) {
  check_options(defaults);
  for (const OptimizerParamGroup& group : param_groups) add_param_group(group);
}

void CPUAdam::add_param_group(const OptimizerParamGroup& param_group) {
  auto options = group_options(param_group, static_cast<const CPUAdamOptions&>(*defaults_));
  check_options(*options);
  Optimizer::add_param_group(param_group);
  param_groups_.back().set_options(std::move(options));
}

void step_cpu_adam(CPUAdam& optimizer, const RoundedParams& rounded) {
  at::NoGradGuard no_grad;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    const auto state = static_cast<const CPUAdamOptions&>(group.options()).state_dtype();
    for (const at::Tensor& param : group.params()) {
      if (!param.grad().defined()) continue;
      check_adam_gradient(param);
      if (state != at::kFloat)
        check_small(state, param.scalar_type(), param.device(), is_dist(param),
                    c10::str("a parameter of shape ", param.sizes()));
    }
  }
  for (OptimizerParamGroup& group : optimizer.param_groups()) step_group(optimizer, group, rounded);
}

at::Tensor CPUAdam::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  step_cpu_adam(*this, {});
  return loss;
}

void CPUAdam::save(OutputArchive& archive) const {
  torch::optim::serialize<CPUAdamParamState, CPUAdamOptions>(archive, *this);
}
void CPUAdam::load(InputArchive& archive) {
  std::vector<at::ScalarType> dtypes;
  for (const OptimizerParamGroup& group : param_groups())
    dtypes.push_back(static_cast<const CPUAdamOptions&>(group.options()).state_dtype());
  torch::optim::serialize<CPUAdamParamState, CPUAdamOptions>(archive, *this);
  for (size_t i = 0; i < dtypes.size(); ++i)
    static_cast<CPUAdamOptions&>(param_groups()[i].options()).state_dtype(dtypes[i]);
}

std::vector<CutRule> cpu_adam_cuts() { return {{"*", Cut::kElements, kStateBlock}}; }

}  // namespace tessera
