#include "dialects/fairscale_sharding.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/world.h>

#include <algorithm>
#include <utility>

#include "model/sharded_state.h"
#include "model/sharded_state.h"
#include "optim/optimizer_parameters.h"
#include "optim/sharded_optimizer_access.h"

namespace tessera::fairscale::detail {
namespace {

std::vector<NamedTensor> parameters_of(const Sharding& sharding) {
  if (sharding.module) return named_tensors(sharding.module->named_parameters());
  std::vector<NamedTensor> parameters;
  for (const OssImpl* optimizer : sharding.optimizers) {
    const auto& groups = std::as_const(*optimizer->oss).param_groups();
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
  plan.owners.clear();
  plan.ignored.clear();
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
    TORCH_CHECK_VALUE(options.group == first.group && options.broadcast_fp16 == first.broadcast_fp16,
                      "[ShardedDataParallel] all optimizers must have one group and one broadcast_fp16");
  }
  TORCH_CHECK_VALUE(!sharding.plan.process_group || !first.group || sharding.plan.process_group == first.group,
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

void Sharding::give_back_optimizers() {
  for (OssImpl* optimizer : optimizers) {
    give_back_optimizer(*optimizer->sharded);
    optimizer->sharded.reset();
  }
}

void Sharding::take_apart() {
  ShardedState& state = *sharded->state();
  give_back_optimizers();
  state.give_back(GivenValues::kUpdated);
  sharded.reset();
}

void Sharding::leave_optimizers() {
  for (OssImpl* optimizer : std::exchange(optimizers, {})) optimizer->sharding.reset();
}

void Sharding::dissolve() {
  const auto keep_alive = optimizers.empty() ? nullptr : optimizers.front()->sharding;
  if (sharded) take_apart();
  leave_optimizers();
}

void Sharding::unwrap() {
  const auto keep_alive = optimizers.empty() ? nullptr : optimizers.front()->sharding;
  const std::shared_ptr<ShardedState> state = sharded->state();
  state->check_unwrap();
  give_back_optimizers();
  state->unwrap();
  sharded.reset();
  leave_optimizers();
}

void Sharding::rebuild(const std::function<void()>& change) {
  // Errors of the new model must be known before the old one is taken apart.
  check_on_all_ranks(sharded->state()->mesh(), [&] {
    TORCH_CHECK(!optimizers.empty(), "[ShardedDataParallel] the model has no optimizer any more: they are "
                "gone, and what is to be reduced is not known");
    TORCH_CHECK(!sharded->state()->reducer().is_no_sync(),
                "[ShardedDataParallel] parameters can't be converted or added under no_sync()");
    check_parameters(*this, parameters_of(*this));
  });
  take_apart();
  change();
  const StartValues start = std::exchange(plan.start_values, StartValues::kKeep);
  build();
  plan.start_values = start;
}

}  // namespace tessera::fairscale::detail
