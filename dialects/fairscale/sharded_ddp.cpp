#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <tessera/comm/world.h>

#include <algorithm>
#include <utility>

#include "dialects/element_bytes.h"
#include "dialects/fairscale/sharding.h"
#include "engine/grad/grad_gate.h"
#include "engine/optim/foreign_state.h"
#include "engine/optim/joined_training.h"
#include "engine/unit/agreement.h"

namespace tessera::fairscale {
namespace {

using detail::OssImpl;
using detail::Sharding;

ShardPlan plan_of(const torch::nn::Module& module, const ShardedDataParallelOptions& options) {
  ShardPlan plan{.level = ShardLevel::kGradients, .partition = Partition::kWholeParam};
  plan.process_group = options.process_group;
  plan.sync_buffers = options.broadcast_buffers;
  plan.start_values = options.sync_models_at_startup ? StartValues::kBroadcast : StartValues::kKeep;
  if (options.reduce_fp16) plan.precision.reduce_dtype = at::kHalf;
  if (options.reduce_buffer_size)
    plan.unit_bytes = element_bytes(module, *options.reduce_buffer_size);
  return plan;
}

std::vector<bool> trainable_mask(const torch::nn::Module& module) {
  std::vector<bool> mask;
  for (const at::Tensor& param : module.parameters()) mask.push_back(param.requires_grad());
  return mask;
}

// `Module::to` would convert integer counters, too.
void convert_floating(torch::nn::Module& module, at::ScalarType dtype, bool non_blocking) {
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    for (const at::Tensor& tensor : tensors)
      if (tensor.is_floating_point()) tensor.set_data(tensor.detach().to(dtype, non_blocking));
  }
}

// A parameter's owner has more digits than are sent. A conversion to a dtype as narrow as that of
// the messages must start from the same values on all ranks.
void round_as_sent(const Sharding& sharding, at::ScalarType dtype) {
  const auto is_wider = [](at::ScalarType type) {
    return c10::elementSize(type) > c10::elementSize(at::kHalf);
  };
  if (!sharding.optimizers.front()->options.broadcast_fp16 || is_wider(dtype)) return;
  for (const OssImpl* optimizer : sharding.optimizers) {
    for (const at::Tensor& param : optimizer->params()) {
      if (param.requires_grad() && is_wider(param.scalar_type()))
        param.set_data(param.detach().to(at::kHalf));
    }
  }
}

}  // namespace

void AnyShardedDataParallel::check(const std::vector<AnyOss*>& optimizers) const {
  TORCH_CHECK_VALUE(!optimizers.empty() && std::none_of(optimizers.begin(), optimizers.end(),
                                                        [](const AnyOss* oss) { return !oss; }),
                    "[ShardedDataParallel] the module's OSS optimizers must be given; got none, or "
                    "a null pointer");
  TORCH_CHECK_VALUE(options_.reduce_buffer_size.value_or(0) >= 0,
                    "[ShardedDataParallel] reduce_buffer_size must not be negative; got ",
                    options_.reduce_buffer_size.value_or(0));
  const auto parameters = module_->named_parameters();
  TORCH_CHECK_VALUE(!parameters.is_empty(),
                    "[ShardedDataParallel] the module must have parameters; it has none");
  for (const auto& item : parameters) {
    TORCH_CHECK_VALUE(item.value().device().type() == parameters[0].value().device().type(),
                      "[ShardedDataParallel] all parameters must be on one type of device; '",
                      item.key(), "' is on ", item.value().device());
  }
  for (const AnyOss* oss : optimizers) {
    TORCH_CHECK_VALUE(!oss->impl_->sharding || !oss->impl_->sharding->has_wrapper,
                      "[ShardedDataParallel] an OSS can serve one module only; one of these serves "
                      "another already");
  }
}

AnyShardedDataParallel::AnyShardedDataParallel(std::shared_ptr<torch::nn::Module> module,
                                               const std::vector<AnyOss*>& optimizers,
                                               const ShardedDataParallelOptions& options)
    : module_(std::move(module)), options_(options), sharding_(std::make_shared<Sharding>()) {
  const auto group = !options.process_group && !optimizers.empty() && optimizers.front()
                         ? optimizers.front()->impl_->options.group
                         : options.process_group;
  const ShardMesh mesh(group ? group : default_process_group(), nullptr);
  check_on_all_ranks(mesh, [&] { check(optimizers); });
  sharding_->module = module_;
  sharding_->plan = plan_of(*module_, options_);
  for (AnyOss* oss : optimizers) {
    oss->impl_->adopt_new_groups();
    // It has stepped by itself, or for a wrapper that no longer exists; from now on it steps with
    // this module's gradients.
    if (const auto before = oss->impl_->sharding) before->dissolve(GivenValues::kUpdated);
    sharding_->optimizers.push_back(oss->impl_.get());
  }
  sharding_->build();
  for (OssImpl* optimizer : sharding_->optimizers) optimizer->sharding = sharding_;
  sharding_->has_wrapper = true;
  if (options_.sync_models_at_startup) sync_buffers(/*blocking=*/true);
  trainable_ = trainable_mask(*module_);
}

AnyShardedDataParallel::~AnyShardedDataParallel() { sharding_->has_wrapper = false; }

ShardedModule AnyShardedDataParallel::sharded() const {
  TORCH_CHECK(sharding_->sharded,
              "[ShardedDataParallel] the model was unwrapped: its parameters are ordinary tensors "
              "again, and the module itself is to be used");
  return *sharding_->sharded;
}
void AnyShardedDataParallel::unwrap() {
  sharded();
  sharding_->dissolve(GivenValues::kUsed);
}

void AnyShardedDataParallel::train(bool on) { module_->train(on); }
bool AnyShardedDataParallel::training() const { return module_->is_training(); }

void AnyShardedDataParallel::zero_grad(bool set_to_none) {
  sharded().zero_grad(set_to_none);
  for (const at::Tensor& param : module_->parameters()) {
    if (has_grad_gate(param)) continue;
    at::Tensor& gradient = param.mutable_grad();  // of a parameter without an optimizer
    if (gradient.defined()) gradient = set_to_none ? at::Tensor() : at::zeros_like(gradient);
  }
}

c10::DeviceType AnyShardedDataParallel::device_type() const {
  return module_->parameters().front().device().type();
}

// Changes of trainable parameters need no preparation: hooks are on all parameters, and at the end
// of each backward the ranks agree on the parameters that were used.
void AnyShardedDataParallel::refresh_trainable() {
  const ShardedModule model = sharded();
  ShardedState& state = *model.state();
  std::vector<std::string> lines;
  for (const auto& item : module_->named_parameters())
    lines.push_back("'" + item.key() + "' " +
                    (item.value().requires_grad() ? "trainable" : "frozen"));
  check_same_lines(state.mesh(), lines,
                   "[refresh_trainable] all ranks must train the same parameters");
  if (state.reducer().has_waiting()) {
    TORCH_WARN(
        "[refresh_trainable] gradients are waiting to be reduced; if that is meant, to accumulate "
        "them, do it under no_sync()");
  }
  trainable_ = trainable_mask(*module_);
}

void AnyShardedDataParallel::begin_forward() {
  if (options_.auto_refresh_trainable) {
    auto mask = trainable_mask(*module_);
    if (mask != trainable_ && options_.warn_on_trainable_params_changed)
      TORCH_WARN(
          "[ShardedDataParallel] some parameters were frozen or unfrozen since the last forward");
    trainable_ = std::move(mask);
  }
  sharded().begin_forward();
}

void AnyShardedDataParallel::end_forward() { sharded().end_forward(); }

void AnyShardedDataParallel::join(const std::function<void()>& train) {
  std::vector<JoinedOptimizer> joined;
  for (OssImpl* optimizer : sharding_->optimizers) {
    torch::optim::Optimizer* const inner = optimizer->inner.get();
    // One of another language keeps its learning rates itself.
    torch::optim::Optimizer* const options = as_foreign(*inner) ? inner : optimizer->oss;
    joined.push_back({inner, options, [optimizer] { optimizer->oss->step(); }});
  }
  train_joined(*sharded().state(), joined, train);
}

void AnyShardedDataParallel::convert(std::optional<at::Device> device,
                                     std::optional<at::ScalarType> dtype, bool non_blocking) {
  check_on_all_ranks(sharded().state()->mesh(), [&] {
    TORCH_CHECK_VALUE(!device || device->type() == device_type(),
                      "[ShardedDataParallel] the type of device can't change, because the "
                      "optimizers have their state there; expected ",
                      device_type(), ", got ", *device);
    TORCH_CHECK_VALUE(!dtype || c10::isFloatingType(*dtype),
                      "[ShardedDataParallel] dtype must be floating; got ", *dtype);
  });
  sharding_->rebuild([&] {
    if (device) module_->to(*device, non_blocking);
    if (!dtype) return;
    round_as_sent(*sharding_, *dtype);
    convert_floating(*module_, *dtype, non_blocking);
  });
}

}  // namespace tessera::fairscale
