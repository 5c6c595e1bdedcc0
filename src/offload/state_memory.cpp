#include "offload/state_memory.h"

namespace tessera {

std::shared_ptr<StateMemory> make_state_memory(const ShardPlan& plan) {
  switch (plan.offload) {
    case Offload::kNone:
      return nullptr;
    case Offload::kHost:
      return host_memory();
    case Offload::kDirectory:
      return mapped_directory(plan.offload_directory);
  }
  return nullptr;
}

}  // namespace tessera
