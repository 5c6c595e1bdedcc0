#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <vector>

namespace tessera {

/// All that a plan depends on, as numbers: the operator, of each tensor its place, dtype, sizes and
/// strides, and the other arguments.
using PlanKey = std::vector<int64_t>;

struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const;
};

/// Writes the key of a call. Returns false for one that can't be told by a few numbers.
bool write_plan_key(PlanKey& key, const c10::OperatorHandle& op,
                    at::ArrayRef<c10::IValue> arguments);

}  // namespace tessera
