#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// All that a plan depends on, as numbers: the operator, the placement, dtype, sizes and strides of
/// each tensor, and the other arguments.
using PlanKey = std::vector<int64_t>;

struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const;
};

/// Writes the key of a call. Returns false if the call can't be identified by a few numbers.
bool write_plan_key(PlanKey& key, const c10::OperatorHandle& op,
                    at::ArrayRef<c10::IValue> arguments);

}  // namespace tessera
