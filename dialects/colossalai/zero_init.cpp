#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/base/generator.h>
#include <tessera/init/deferred_init.h>

#include <limits>
#include <mutex>
#include <set>
#include <utility>

#include "base/device/device.h"
#include "dialects/colossalai/state.h"

namespace tessera::colossalai {
namespace detail {

struct ZeroContext {
  std::shared_ptr<const ParamOrigin> origin;
  at::Tensor generator_state;  // before the context; undefined without a seed
  std::optional<DeferredInit> deferred;
  std::optional<OriginScope> scope;
};

}  // namespace detail

namespace {

void check_options(at::Device device, const ShardStrategyPtr& strategy,
                   const ZeroInitOptions& options) {
  TORCH_CHECK_VALUE(!detail::ParamOrigin::current(),
                    "[ZeroInitContext] must not be in another ZeroInitContext");
  TORCH_CHECK_VALUE(has_device(device),
                    "[ZeroInitContext] target_device must be a device of this process, which has ",
                    devices_text(), "; got ", device);
  TORCH_CHECK_VALUE(strategy, "[ZeroInitContext] shard_strategy must not be null");
  const std::set<at::ScalarType> dtypes = {at::kHalf, at::kBFloat16, at::kFloat};
  TORCH_CHECK_VALUE(dtypes.contains(options.param_dtype),
                    "[ZeroInitContext] param_dtype must be Half, BFloat16 or Float; got ",
                    options.param_dtype);
  const at::Tensor& numel = options.model_numel_tensor;
  TORCH_CHECK_VALUE(
      !numel.defined() || (numel.numel() == 1 &&
                           (numel.scalar_type() == at::kLong || numel.scalar_type() == at::kInt)),
      "[ZeroInitContext] model_numel_tensor must be one element of dtype Long or Int; got ",
      numel.numel(), " of ", numel.scalar_type());
}

at::Tensor seeded_from(uint64_t seed) {
  at::Tensor state;
  {
    at::Generator generator = default_generator();
    const std::lock_guard lock(generator.mutex());
    state = generator.get_state();
  }
  manual_seed(seed);
  return state;
}

// Adds the parameters among `made` to `total`. They require gradients; buffers do not. Intermediate
// tensors are freed by now.
void count_parameters(const detail::ParamOrigin::Made& made, const at::Tensor& total) {
  const at::NoGradGuard no_grad;
  std::set<const c10::TensorImpl*> seen;
  int64_t numel = 0;
  for (const auto& weak : made) {
    const auto impl = weak.lock();
    if (!impl || !seen.insert(impl.get()).second) continue;
    const at::Tensor tensor(impl);
    if (tensor.is_leaf() && tensor.requires_grad()) numel += tensor.numel();
  }
  const int64_t most = total.scalar_type() == at::kInt ? std::numeric_limits<int32_t>::max()
                                                       : std::numeric_limits<int64_t>::max();
  const int64_t before = total.item<int64_t>();
  const bool fits = before <= most - numel;
  if (!fits) {
    TORCH_WARN("[ZeroInitContext] model_numel_tensor can't hold ", before, " + ", numel,
               " elements; it gets ", most);
  }
  total.fill_(fits ? before + numel : most);
}

}  // namespace

ZeroInitContext::ZeroInitContext(at::Device target_device, ShardStrategyPtr shard_strategy,
                                 const ZeroInitOptions& options) {
  check_options(target_device, shard_strategy, options);
  const auto origin = std::make_shared<detail::ParamOrigin>();
  origin->device = target_device;
  origin->strategy = std::move(shard_strategy);
  origin->options = options;
  if (options.model_numel_tensor.defined())
    origin->made = std::make_shared<detail::ParamOrigin::Made>();
  state_ = std::make_unique<detail::ZeroContext>();
  state_->origin = origin;
  if (options.seed) state_->generator_state = seeded_from(*options.seed);
  if (options.rm_torch_payload_on_the_fly) state_->deferred.emplace();
  state_->scope.emplace(origin);
}

ZeroInitContext::~ZeroInitContext() {
  state_->scope.reset();
  state_->deferred.reset();
  if (state_->generator_state.defined()) {
    at::Generator generator = default_generator();
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state_->generator_state);
  }
  if (const auto& made = state_->origin->made) {
    count_parameters(*made, state_->origin->options.model_numel_tensor);
    made->clear();
  }
}

NoShardZeroContext::NoShardZeroContext(bool is_replicated) {
  const auto outer = detail::ParamOrigin::current();
  if (!outer) return;
  auto origin = std::make_shared<detail::ParamOrigin>(*outer);
  origin->options.shard_param = false;
  origin->is_replicated = is_replicated;
  state_ = std::make_unique<detail::ZeroContext>();
  state_->scope.emplace(std::move(origin));
}

NoShardZeroContext::~NoShardZeroContext() = default;

}  // namespace tessera::colossalai
