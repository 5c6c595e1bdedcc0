#include "dialects/fairscale_sharding.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/world.h>

#include <algorithm>
#include <utility>

#include "access/named_tensors.h"
#include "access/sharded_state.h"
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

// The owners that the optimizers have chosen. What none of them has is left alone.
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

// A parameter that no module has, or that two optimizers or groups have, would not be trained as
// meant.
void check_parameters(const Sharding& sharding, const std::vector<NamedTensor>& parameters) {
  std::map<const c10::TensorImpl*, std::string> names;
  for (const NamedTensor& parameter : parameters)
    names.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter.name);
  std::map<const c10::TensorImpl*, std::pair<const OssImpl*, size_t>> seen;
  for (const OssImpl* optimizer : sharding.optimizers) {
    const auto& groups = std::as_const(*optimizer->oss).param_groups();
    for (size_t group = 0; group < groups.size(); ++group) {
      for (const at::Tensor& param : groups[group].params()) {
        const auto name = names.find(param.unsafeGetTensorImpl());
        TORCH_CHECK_VALUE(name != names.end(), "[ShardedDataParallel] the optimizers' parameters must be the module's; "
                          "one of shape ", param.sizes(), " in group ", group, " is not");
        const auto first = seen.emplace(name->first, std::pair(optimizer, group)).first->second;
        TORCH_CHECK_VALUE(first.first == optimizer, "[ShardedDataParallel] a parameter must be in one optimizer; '",
                          name->second, "' is in two");
        TORCH_CHECK_VALUE(first.second == group, "[OSS] a parameter must be in one param group; '", name->second,
                          "' is in groups ", first.second, " and ", group);
      }
    }
  }
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

void Sharding::take_apart() {
  for (OssImpl* optimizer : optimizers) {
    give_back_optimizer(*optimizer->sharded);
    optimizer->sharded.reset();
  }
  sharded->state()->give_back();
  sharded.reset();
}

void Sharding::rebuild(const std::function<void()>& change) {
  // What can't be built must be known before the old one is gone.
  check_on_all_ranks(sharded->state()->mesh(), [&] {
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

OssImpl::~OssImpl() {
  if (sharding) std::erase(sharding->optimizers, this);
}

// FairScale's rule: in the order of the groups, each parameter goes to the rank that has least so
// far, the lowest of equals. A frozen one counts as one element.
void OssImpl::choose_owners() {
  for (const auto& group : std::as_const(*oss).param_groups()) {
    for (const at::Tensor& param : group.params()) {
      const auto least = std::min_element(load.begin(), load.end());
      const int owner = static_cast<int>(least - load.begin());
      if (!owners.emplace(param.unsafeGetTensorImpl(), owner).second) continue;
      *least += param.requires_grad() ? param.numel() : 1;
    }
  }
}

void OssImpl::adopt_new_groups() {
  const auto& groups = std::as_const(*oss).param_groups();
  if (groups.size() == inner->param_groups().size()) return;
  const auto add = [&] {
    for (size_t i = inner->param_groups().size(); i < groups.size(); ++i)
      inner->add_param_group(groups[i]);
    choose_owners();
    consolidated.reset();
  };
  sharded ? sharding->rebuild(add) : add();
}

bool OssImpl::was_converted() const {
  const auto& units = sharding->sharded->state()->units();
  return std::any_of(units.begin(), units.end(), [](const auto& unit) {
    return std::any_of(unit->layout().slots.begin(), unit->layout().slots.end(),
                       [&](const ParamSlot& slot) {
                         return slot.local().defined() && unit_of(slot.local()) != unit.get();
                       });
  });
}

ShardedOptimizer& OssImpl::ready() {
  adopt_new_groups();
  if (!sharded) {
    sharding = std::make_shared<Sharding>();
    sharding->plan.level = ShardLevel::kOptimizerState;
    sharding->plan.partition = Partition::kWholeParam;
    sharding->plan.reduce_gradients = false;
    sharding->plan.start_values = StartValues::kKeep;
    sharding->optimizers = {this};
    sharding->build();
  } else if (!sharding->module && was_converted()) {
    sharding->rebuild([] {});
  }
  return *sharded;
}

ShardedOptimizer& OssImpl::ready_to_change() {
  consolidated.reset();
  return ready();
}

void LentGroups::swap() {
  auto& own = impl_.oss->param_groups();
  auto& inner = impl_.inner->param_groups();
  std::swap(own, inner);
  for (size_t i = 0; i < own.size(); ++i) std::swap(own[i].params(), inner[i].params());
}

}  // namespace tessera::fairscale::detail
