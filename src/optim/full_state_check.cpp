#include "optim/full_state_check.h"

#include <c10/util/Exception.h>

#include "model/sharded_state.h"
#include "optim/sharded_optimizer_access.h"

namespace tessera {

void check_segments(const ShardedOptimizer& optimizer, const char* function) {
  const ShardedState& state = *optimizer.module().state();
  state.check_replicated(function);
  for (const Segment& segment : segments_of(optimizer)) {
    TORCH_CHECK_NOT_IMPLEMENTED(!state.slot(segment.place).dist, "[", function, "] the parameters must not be "
                                "DistTensors; use DistOptimizer::state_dict() and load_state_dict() for those");
  }
}

}  // namespace tessera
