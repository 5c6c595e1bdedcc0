#include "dialects/fairscale/sharding.h"

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <tessera/comm/world.h>

#include <algorithm>
#include <utility>

#include "engine/model/unwrap_module.h"
#include "engine/optim/optimizer_parameters.h"
#include "engine/optim/sharded_optimizer_access.h"

namespace tessera::fairscale::detail {
namespace {

std::vector<NamedTensor> parameters_of(const Sharding& sharding) {
  if (sharding.module) return named_tensors(sharding.module->named_parameters());
  std::vector<NamedTensor> parameters;
  for (const OssImpl* optimizer : sharding.optimizers) {
    const auto& groups = optimizer->oss->param_groups();
    for (size_t group = 0; group < groups.size(); ++group) {
      for (size_t i = 0; i < groups[group].params().size(); ++i)
        parameters.push_back(
            {fmt::format("parameter {} of group {}", i, group), groups[group].params()[i]});
    }
  }
  return parameters;
}

// Sets the owners that the optimizers have chosen. Ignores parameters without an optimizer.
void set_owners(ShardPlan& plan, const std::vector<NamedTensor>& parameters,
                const std::vector<OssImpl*>& optimizers) {
  std::map<const c10::TensorImpl*, int> owners;
  for (const OssImpl* optimizer : optimizers)
    owners.insert(optimizer->owners.begin(), optimizer->owners.end());
  for (const NamedTensor& parameter : parameters) {
    const auto it = owners.find(parameter.tensor.unsafeGetTensorImpl());
    if (it == owners.end()) {
      plan.ignored.push_back(parameter.name);
    } else {
      plan.owners[parameter.name] = it->second;
    }
  }
}

void check_options(const Sharding& sharding) {
  const OssOptions& first = sharding.optimizers.front()->options;
  for (const OssImpl* optimizer : sharding.optimizers) {
    const OssOptions& options = optimizer->options;
    TORCH_CHECK_VALUE(
        options.group == first.group && options.broadcast_fp16 == first.broadcast_fp16,
        "[ShardedDataParallel] all optimizers must have one group and one broadcast_fp16");
  }
  TORCH_CHECK_VALUE(
      !sharding.plan.process_group || !first.group || sharding.plan.process_group == first.group,
      "[ShardedDataParallel] process_group must be the optimizers' group; got another one");
}

void check_parameters(const Sharding& sharding, const std::vector<NamedTensor>& parameters) {
  std::vector<const torch::optim::Optimizer*> optimizers;
  for (const OssImpl* optimizer : sharding.optimizers) optimizers.push_back(optimizer->oss);
  check_optimized_once(sharding.module ? "ShardedDataParallel" : "OSS", parameters, optimizers);
}

}  // namespace

void Sharding::build() {
  ShardPlan full = plan;
  const std::vector<NamedTensor> parameters = parameters_of(*this);
  if (!full.process_group) full.process_group = optimizers.front()->options.group;
  const ShardMesh mesh(full.process_group ? full.process_group : default_process_group(), nullptr);
  check_on_all_ranks(mesh, [&] {
    check_options(*this);
    check_parameters(*this, parameters);
  });
  if (optimizers.front()->options.broadcast_fp16) full.precision.gather_dtype = at::kHalf;
  set_owners(full, parameters, optimizers);
  std::vector<NamedTensor> buffers;
  if (module) buffers = named_tensors(module->named_buffers());
  sharded.emplace(ShardedState::create(parameters, std::move(buffers), full));
  for (OssImpl* optimizer : optimizers) optimizer->sharded.emplace(*sharded, *optimizer->inner);
}

Sharding::~Sharding() {
  if (sharded) sharded->state()->release();
}

void Sharding::take_apart(GivenValues which) {
  ShardedState& state = *sharded->state();
  for (OssImpl* optimizer : optimizers) {
    OptimizerAccess(*optimizer->sharded).give_back();
    optimizer->sharded.reset();
  }
  which == GivenValues::kUsed ? unwrap(state) : state.give_back(which);
  sharded.reset();
}

void Sharding::dissolve(GivenValues which) {
  const auto keep_alive = optimizers.empty() ? nullptr : optimizers.front()->sharding;
  if (sharded && which == GivenValues::kUsed) check_unwrap(*sharded->state());
  if (sharded) take_apart(which);
  for (OssImpl* optimizer : std::exchange(optimizers, {})) optimizer->sharding.reset();
}

void Sharding::rebuild(const std::function<void()>& change) {
  // Errors of the new model must be known before the old one is taken apart.
  check_on_all_ranks(sharded->state()->mesh(), [&] {
    TORCH_CHECK(!optimizers.empty(),
                "[ShardedDataParallel] the model has no optimizer any more: they were destroyed, "
                "and it is unknown which gradients to reduce");
    TORCH_CHECK(!sharded->state()->reducer().is_no_sync(),
                "[ShardedDataParallel] parameters can't be converted or added under no_sync()");
    check_parameters(*this, parameters_of(*this));
  });
  take_apart(GivenValues::kUpdated);
  change();
  const StartValues start = std::exchange(plan.start_values, StartValues::kKeep);
  build();
  plan.start_values = start;
}

OssImpl::~OssImpl() {
  if (sharding) std::erase(sharding->optimizers, this);
}

std::vector<at::Tensor> OssImpl::params() const {
  std::vector<at::Tensor> params;
  for (const auto& group : oss->param_groups())
    params.insert(params.end(), group.params().begin(), group.params().end());
  return params;
}

// A frozen parameter counts as one element, as in FairScale.
void OssImpl::choose_owners() {
  for (const at::Tensor& param : params()) {
    const int owner = ranks.next();
    if (!owners.emplace(param.unsafeGetTensorImpl(), owner).second) continue;
    ranks.add(owner, param.requires_grad() ? param.numel() : 1);
  }
}

void OssImpl::adopt_new_groups() {
  const auto& groups = oss->param_groups();
  if (groups.size() == inner->param_groups().size()) return;
  const auto add = [&] {
    for (size_t i = inner->param_groups().size(); i < groups.size(); ++i)
      inner->add_param_group(groups[i]);
    choose_owners();
    consolidated.reset();
  };
  sharded ? sharding->rebuild(add) : add();
}

ShardedOptimizer& OssImpl::ready() {
  adopt_new_groups();
  if (!sharded) {
    sharding = std::make_shared<Sharding>();
    sharding->plan = {.level = ShardLevel::kOptimizerState,
                      .partition = Partition::kWholeParam,
                      .reduce_gradients = false,
                      .start_values = StartValues::kKeep};
    sharding->optimizers = {this};
    sharding->build();
  } else if (!sharding->module && !sharding->sharded->state()->replaced().empty()) {
    sharding->rebuild([] {});  // parameters were converted
  }
  return *sharded;
}

void OssImpl::lend(const std::function<void(ShardedOptimizer&)>& use) {
  ShardedOptimizer& optimizer = ready();
  swap_groups();
  const auto take_back = c10::make_scope_exit([this] { swap_groups(); });
  use(optimizer);
}

void OssImpl::swap_groups() {
  auto& own = oss->param_groups();
  auto& other = inner->param_groups();
  std::swap(own, other);
  for (size_t i = 0; i < own.size(); ++i) std::swap(own[i].params(), other[i].params());
}

}  // namespace tessera::fairscale::detail
