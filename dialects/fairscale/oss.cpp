#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/comm/world.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <set>
#include <utility>

#include "dialects/fairscale/sharding.h"
#include "engine/optim/sharded_optimizer_access.h"

namespace tessera::fairscale {
namespace {

using detail::OssImpl;

// Returns the names of parameters that clipping ignores: those of other optimizers, and those that
// the user's filter excludes.
std::vector<std::string> not_clipped(const OssImpl& impl, const ShardedOptimizer& sharded,
                                     const std::function<bool(const at::Tensor&)>& filter) {
  const ShardedState& state = *sharded.module().state();
  std::set<ParamIndex> clipped;
  for (const at::Tensor& param : impl.params()) {
    const auto place = state.find(param);
    if (place && (!filter || filter(param))) clipped.insert(*place);
  }
  std::vector<std::string> names;
  for (size_t unit = 0; unit < state.units().size(); ++unit) {
    const auto& slots = state.units()[unit]->layout().slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      if (!clipped.contains({unit, slot})) names.push_back(slots[slot].name());
    }
  }
  return names;
}

const OptimizerStateDict& consolidated(const OssImpl& impl) {
  TORCH_CHECK(impl.consolidated,
              "[OSS] the state must be gathered before it is read: call consolidate_state_dict() "
              "on all ranks after the last step, with this one as recipient (or -1: all)");
  return *impl.consolidated;
}

}  // namespace

AnyOss::AnyOss(std::unique_ptr<torch::optim::Optimizer> inner, const OssOptions& options)
    : Optimizer(inner->param_groups(), inner->defaults().clone()), impl_(new OssImpl) {
  impl_->oss = this;
  impl_->inner = std::move(inner);
  impl_->options = options;
  const auto group = options.group ? options.group : default_process_group();
  impl_->ranks = LeastLoaded(group->size());
  impl_->choose_owners();
  TORCH_CHECK_VALUE(!impl_->owners.empty(),
                    "[OSS] the optimizer must have parameters; it got none");
}

AnyOss::~AnyOss() = default;

at::Tensor AnyOss::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  with_sharded([](ShardedOptimizer& sharded) { sharded.step(); });
  return loss;
}

void AnyOss::add_param_group(const torch::optim::OptimizerParamGroup& param_group) {
  Optimizer::add_param_group(param_group);
  try {
    impl_->adopt_new_groups();
  } catch (...) {
    if (impl_->inner->param_groups().size() < param_groups().size()) param_groups().pop_back();
    throw;
  }
}

double AnyOss::clip_grad_norm(double max_norm, double norm_type,
                              const std::function<bool(const at::Tensor&)>& filter_params_fn) {
  ShardedOptimizer& sharded = impl_->ready();
  return sharded.clip_grad_norm_(
      max_norm,
      {.norm_type = norm_type, .exclude = not_clipped(*impl_, sharded, filter_params_fn)});
}

void AnyOss::consolidate_state_dict(int recipient_rank) {
  impl_->lend([&](ShardedOptimizer& sharded) {
    OptimizerStateDict state = full_state_dict(sharded, recipient_rank);
    const int rank = sharded.module().state()->process_group().rank();
    impl_->consolidated.reset();
    if (recipient_rank == -1 || recipient_rank == rank) impl_->consolidated = std::move(state);
  });
}

OptimizerStateDict AnyOss::state_dict(bool all_ranks) {
  if (all_ranks) consolidate_state_dict(-1);
  return consolidated(*impl_);
}

void AnyOss::load_state_dict(const OptimizerStateDict& state) {
  with_sharded([&](ShardedOptimizer& sharded) { load_full_state_dict(sharded, state); });
}

void AnyOss::save(torch::serialize::OutputArchive& archive) const {
  consolidated(*impl_).save(archive);
}

void AnyOss::load(torch::serialize::InputArchive& archive) {
  load_state_dict(OptimizerStateDict::load(archive));
}

std::vector<std::vector<at::Tensor>> AnyOss::partition_parameters() const {
  std::vector<std::vector<at::Tensor>> ranks(impl_->ranks.ranks());
  for (const at::Tensor& param : impl_->params())
    ranks[impl_->owners.at(param.unsafeGetTensorImpl())].push_back(param);
  return ranks;
}

at::Tensor AnyOss::gradient(const at::Tensor& param) {
  const auto own = impl_->params();
  TORCH_CHECK_VALUE(std::any_of(own.begin(), own.end(),
                                [&](const at::Tensor& other) { return other.is_same(param); }),
                    "[OSS] the tensor must be a parameter of the optimizer; got one of shape ",
                    param.sizes());
  return impl_->ready().module().local_grad(param);
}

void AnyOss::unwrap() {
  // On all ranks: it has the parameters from its first collective call on.
  if (!impl_->sharding) return;
  TORCH_CHECK(!impl_->sharding->has_wrapper,
              "[OSS] the optimizer serves a ShardedDataParallel: call unwrap() of that");
  impl_->sharding->dissolve(GivenValues::kUsed);
}

void AnyOss::with_sharded(const std::function<void(ShardedOptimizer&)>& use) {
  impl_->consolidated.reset();  // from now on it is out of date
  impl_->lend(use);
}

ShardMemory AnyOss::memory() const {
  return impl_->sharded ? impl_->sharded->memory() : ShardMemory{};
}

void ShardedGradScaler::unscale_(AnyOss& optimizer) {
  GradScaler::unscale_(optimizer.impl_->ready());
}

bool ShardedGradScaler::step(AnyOss& optimizer) {
  bool stepped = false;
  optimizer.with_sharded([&](ShardedOptimizer& sharded) { stepped = GradScaler::step(sharded); });
  return stepped;
}

bool ShardedGradScaler::step(AnyOss& optimizer, const std::function<at::Tensor()>& closure) {
  if (is_enabled()) return GradScaler::step(optimizer.impl_->ready(), closure);
  optimizer.step(closure);
  return true;
}

}  // namespace tessera::fairscale
