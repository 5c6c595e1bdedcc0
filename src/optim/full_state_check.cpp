#include "optim/full_state_check.h"

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include "access/sharded_state.h"
#include "optim/sharded_optimizer_access.h"

namespace tessera {

void check_segments(const ShardedOptimizer& optimizer, const char* function) {
  const ShardedState& state = *optimizer.module().state();
  state.check_replicated(function);
  for (const Segment& segment : segments_of(optimizer)) {
    TORCH_CHECK_NOT_IMPLEMENTED(!state.slot(segment.place).dist, "[", function, "] the parameters must not be "
                                "DistTensors; use DistOptimizer::state_dict() and load_state_dict() for those");
  }
  size_t count = 0;
  for (const auto& group : optimizer.inner().param_groups()) count += group.params().size();
  TORCH_CHECK(count == segments_of(optimizer).size(), "[", function,
              "] the optimizer must have the parameters that it had when the ShardedOptimizer was made; "
              "expected ", segments_of(optimizer).size(), ", got ", count);
}

}  // namespace tessera
