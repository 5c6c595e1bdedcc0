#include "dialects/fairscale_sharding.h"

namespace tessera::fairscale {

using detail::LentGroups;

void ShardedGradScaler::unscale_(AnyOss& optimizer) {
  ShardedOptimizer& sharded = optimizer.impl_->ready();
  GradScaler::unscale_(sharded);
}

bool ShardedGradScaler::step(AnyOss& optimizer) {
  ShardedOptimizer& sharded = optimizer.impl_->ready_to_change();
  LentGroups lent(*optimizer.impl_);
  return GradScaler::step(sharded);
}

bool ShardedGradScaler::step(AnyOss& optimizer, const std::function<at::Tensor()>& closure) {
  if (is_enabled()) return GradScaler::step(optimizer.impl_->ready(), closure);
  optimizer.step(closure);
  return true;
}

}  // namespace tessera::fairscale
