#pragma once

#include <tessera/shard_plan.h>

#include "binding.h"

namespace tessera::python {

/// Returns the plan of keyword arguments, which have the names of the fields of `ShardPlan` and of
/// `Precision`. Throws Python's `TypeError` for an unknown name, and its `ValueError` for an
/// unknown level, partition or place of offloaded state.
ShardPlan plan_of(const py::dict& arguments);

}  // namespace tessera::python
