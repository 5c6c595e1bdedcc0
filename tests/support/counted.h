#pragma once

#include <tessera/comm/process_group_decorators.h>
#include <tessera/comm/world.h>

#include <functional>
#include <memory>

namespace tessera {

/// Counts the messages of `run` over the world's process group, which must be a counting one. A
/// mesh over all ranks uses it.
inline CollectiveCounts count(World& world, const std::function<void()>& run) {
  auto counting = std::dynamic_pointer_cast<CountingProcessGroup>(world.process_group());
  counting->reset_counts();
  run();
  return counting->counts();
}

}  // namespace tessera
