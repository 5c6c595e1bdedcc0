#pragma once

#include <tessera/engine/shard_plan.h>

#include <string>

#include "binding.h"

namespace tessera::python {

/// Returns the plan of keyword arguments. These have the names of the fields of `ShardPlan` and of
/// `Precision`. Throws Python's `TypeError` for an unknown name, and its `ValueError` for an
/// unknown level, partition or place of offloaded state.
ShardPlan plan_of(const py::dict& arguments);
/// Returns the level of that name; throws Python's `ValueError` for an unknown one.
ShardLevel level_of(const std::string& name);
/// Sets the fields that `arguments` names.
void set_fields(ShardPlan& plan, const py::dict& arguments);

}  // namespace tessera::python
