#include <c10/util/Exception.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/trace/memory_tracer.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "base/device/device.h"
#include "dialects/colossalai/state.h"
#include "engine/model/sharded_state.h"

namespace tessera::colossalai {
namespace {

GradScalerOptions scaler_options(const ShardedOptimizerV2Options& options) {
  return {.init_scale = options.initial_scale,
          .growth_factor = options.growth_factor,
          .backoff_factor = options.backoff_factor,
          .growth_interval = options.growth_interval,
          .hysteresis = options.hysteresis,
          .min_scale = options.min_scale,
          .max_scale = options.max_scale,
          .process_group = options.mp_process_group};
}

// Returns the most memory of the device that the model and its activations have taken.
int64_t peak_on_device(const MemoryTracer& tracer) {
  int64_t most = 0;
  for (const MemorySample& sample : tracer.samples()) {
    const int64_t other = std::max(sample.bytes.other, sample.peak_other);
    most = std::max(most, sample.bytes.model() - sample.bytes.offloaded + other);
  }
  return most;
}

void check_options(const detail::ModelState& model, const ShardedOptimizerV2Options& options) {
  const ShardPlan& plan = model.sharded.state()->plan();
  const double ratio = options.gpu_margin_mem_ratio;
  TORCH_CHECK_VALUE(ratio >= 0 && ratio <= 1,
                    "[ShardedOptimizerV2] gpu_margin_mem_ratio must be between 0 and 1; got ",
                    ratio);
  TORCH_CHECK_VALUE(ratio == 0 || plan.offload != Offload::kNone,
                    "[ShardedOptimizerV2] gpu_margin_mem_ratio needs an offloaded model: "
                    "otherwise everything is on the device already");
  TORCH_CHECK_VALUE(ratio == 0 || (model.tracer && model.options.memory_budget),
                    "[ShardedOptimizerV2] gpu_margin_mem_ratio needs use_memory_tracer and "
                    "memory_budget among the options of ShardedModelV2");
  TORCH_CHECK_VALUE(
      !options.keep_unsharded,
      "[ShardedOptimizerV2] keep_unsharded must be false: optimizer state of parameters that stay "
      "whole is sharded like all other, which does not change any result");
  TORCH_CHECK_VALUE(!options.dp_process_group || options.dp_process_group == plan.process_group,
                    "[ShardedOptimizerV2] dp_process_group must be the process group of the model");
  if (options.cpu_offload && plan.offload == Offload::kNone)
    throw std::runtime_error(
        "[ShardedOptimizerV2] ShardedOptimizerV2 using cpu_offload, but the sharded_model used to "
        "initialize optimizer is not offloaded: give it tensor_placement_policy \"cpu\"");
}

}  // namespace

struct ShardedOptimizerV2::Impl {
  std::shared_ptr<detail::ModelState> model;
  ShardedOptimizerV2Options options;
  ShardedOptimizer sharded;
  GradScaler scaler;
  GradScaler checker;                                  // of gradients whose loss was not scaled
  bool is_unscaled = false;                            // clip_grad_norm() unscaled the gradients
  bool has_margin = options.gpu_margin_mem_ratio > 0;  // the margin is not filled yet

  void fill_margin() {
    if (!std::exchange(has_margin, false)) return;
    const auto margin =
        static_cast<double>(*model->options.memory_budget - peak_on_device(*model->tracer));
    const double share = margin * options.gpu_margin_mem_ratio;
    if (share > 0) sharded.keep_on_device(static_cast<int64_t>(share));
  }

  void begin_backward() {
    TORCH_CHECK(!is_unscaled || !model->has_gradients(),
                "[backward] the gradients were unscaled by clip_grad_norm(): step() or zero_grad() "
                "must come before the next backward");
    is_unscaled = false;
    model->begin_backward(detail::LossScale::kScaled);
  }
  // Returns the scaler that fits the gradients' scale.
  GradScaler& current() {
    return model->loss_scale == detail::LossScale::kScaled ? scaler : checker;
  }
};

ShardedOptimizerV2::ShardedOptimizerV2(AnyShardedModelV2& model, torch::optim::Optimizer& optimizer,
                                       const ShardedOptimizerV2Options& options) {
  check_options(*model.state_, options);
  impl_.reset(
      new Impl{model.state_, options,
               ShardedOptimizer(model.sharded(), optimizer, {.elementwise = options.elementwise}),
               GradScaler(scaler_options(options)),
               GradScaler({.init_scale = 1, .process_group = options.mp_process_group})});
}

ShardedOptimizerV2::~ShardedOptimizerV2() = default;

void ShardedOptimizerV2::backward(const at::Tensor& loss) {
  impl_->begin_backward();
  impl_->scaler.scale(loss).backward();
}

void ShardedOptimizerV2::backward_by_grad(const at::Tensor& tensor, const at::Tensor& grad) {
  impl_->begin_backward();
  tensor.backward(impl_->scaler.scale(grad).to(grad.scalar_type()));
}

bool ShardedOptimizerV2::step() {
  GradScaler& scaler = impl_->current();
  const bool stepped = scaler.step(impl_->sharded);
  impl_->is_unscaled = false;
  scaler.update(&scaler == &impl_->checker ? std::optional(1.0) : std::nullopt);
  if (stepped) {
    impl_->fill_margin();
    return true;
  }
  TORCH_WARN("found inf during ShardedOptimV2 step; the step is skipped, the loss scale is ",
             impl_->scaler.get_scale());
  zero_grad();
  return false;
}

double ShardedOptimizerV2::clip_grad_norm(double max_norm, double norm_type) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !impl_->options.mp_process_group || max_norm == 0,
      "[clip_grad_norm] can't clip over mp_process_group: it is unknown which parameters its ranks "
      "share. Use DistTensors, whose placements tell it");
  if (!impl_->is_unscaled) impl_->current().unscale_(impl_->sharded);
  impl_->is_unscaled = true;
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  return impl_->sharded.clip_grad_norm_(max_norm == 0 ? kNoLimit : max_norm, norm_type);
}

double ShardedOptimizerV2::clip_grad_norm(const AnyShardedModelV2& model, double max_norm,
                                          double norm_type) {
  TORCH_CHECK_VALUE(model.state_ == impl_->model,
                    "[clip_grad_norm] the model must be the one of the optimizer");
  return clip_grad_norm(max_norm, norm_type);
}

void ShardedOptimizerV2::zero_grad() {
  impl_->sharded.zero_grad();
  // Discards the findings of clip_grad_norm() together with the gradients; the scale stays.
  GradScaler& scaler = impl_->current();
  if (std::exchange(impl_->is_unscaled, false)) scaler.update(scaler.get_scale());
  if (!impl_->model->has_gradients()) impl_->model->loss_scale = detail::LossScale::kUnknown;
}

ShardedOptimizerV2State ShardedOptimizerV2::state_dict() {
  return {full_state_dict(impl_->sharded, /*recipient=*/-1), impl_->scaler.state()};
}

void ShardedOptimizerV2::load_state_dict(const ShardedOptimizerV2State& state) {
  load_full_state_dict(impl_->sharded, state.optimizer);
  if (state.scaler.empty()) {
    TORCH_WARN("Missing scaler when loading optimizer state dict");
  } else {
    impl_->scaler.load_state(state.scaler);
  }
}

void ShardedOptimizerV2::unwrap() { impl_->sharded.unwrap(); }

double ShardedOptimizerV2::loss_scale() const { return impl_->scaler.get_scale(); }

std::pair<int64_t, int64_t> ShardedOptimizerV2::get_memory_usage() const {
  const ShardMemory memory = impl_->sharded.memory();
  const int64_t on_device = memory.master_weights + memory.optimizer_state;
  return is_host(*impl_->model->sharded.state()->plan().device)
             ? std::pair(int64_t{0}, on_device + memory.offloaded)
             : std::pair(on_device, memory.offloaded);
}

torch::optim::Optimizer& ShardedOptimizerV2::inner() const { return impl_->sharded.inner(); }
ShardedOptimizer& ShardedOptimizerV2::sharded() { return impl_->sharded; }

}  // namespace tessera::colossalai
