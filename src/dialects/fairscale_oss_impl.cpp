#include <algorithm>
#include <utility>

#include "dialects/fairscale_sharding.h"
#include "model/sharded_state.h"

namespace tessera::fairscale::detail {

OssImpl::~OssImpl() {
  if (sharding) std::erase(sharding->optimizers, this);
}

// Chooses in the order of the groups. A frozen parameter counts as one element, as in FairScale.
void OssImpl::choose_owners() {
  for (const auto& group : std::as_const(*oss).param_groups()) {
    for (const at::Tensor& param : group.params()) {
      const int owner = ranks.next();
      if (!owners.emplace(param.unsafeGetTensorImpl(), owner).second) continue;
      ranks.add(owner, param.requires_grad() ? param.numel() : 1);
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
